"""`pytest-ckpt verify`, as a person types it: what it prints, and its exit status."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from pytest_ckpt.plugin.command import main


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {f"layer.{number}": torch.randn(10) for number in range(30)}
    save(state, storage_writer=FileSystemWriter(tmp_path / "checkpoint"), no_dist=True)
    return tmp_path / "checkpoint"


def test_a_complete_checkpoint_ends_with_one_sentence_and_0(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(checkpoint)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"checkpoint {checkpoint}: torch_save, 30 tensors in 1 file, ")
    assert lines[-1].startswith("complete: 30 entries, ")
    assert main(["verify", str(checkpoint), "--cold", "--threads=1"]) == 0


def test_damage_ends_with_1_and_a_long_list_is_shortened_until_asked_for(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bytearray((checkpoint / "__0_0.distcp").read_bytes())
    for at in range(700, len(data), 200):  # in every entry
        data[at] ^= 255
    (checkpoint / "__0_0.distcp").write_bytes(data)
    assert main(["verify", str(checkpoint)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("damaged (corrupt")
    assert any("more problems (--verbose shows all)" in line for line in lines)
    assert main(["verify", "--verbose", str(checkpoint)]) == 1
    assert len(capsys.readouterr().out.splitlines()) > len(lines)


def test_json_holds_all_that_was_found(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / "__0_0.distcp").unlink()
    assert main(["verify", "--json", str(checkpoint)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["outcome"], found["is_complete"], found["verdicts"]) == ("missing-file", False, {"missing-file": 30})
    assert found["problems"][0]["file"] == "__0_0.distcp"


def test_a_repaired_checkpoint_is_complete_to_the_one_who_says_so(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = (checkpoint / ".metadata").stat().st_mtime_ns + 10**9
    os.utime(checkpoint / "__0_0.distcp", ns=(later, later))
    assert main(["verify", str(checkpoint)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("perhaps a mix, not a checkpoint: __0_0.distcp ")
    assert main(["verify", "--ignore-times", str(checkpoint)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("complete: 30 entries, ")


@pytest.mark.parametrize("arguments", [[], ["nowhere"], ["."], [".", "--threads=0"]])
def test_what_cannot_be_verified_ends_with_4(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify", *arguments]) == 4
    assert capsys.readouterr()


def test_the_names_that_metadata_may_have_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--allowed"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "torch.Size" in printed
    assert "torch.distributed.checkpoint.filesystem._StorageInfo" in printed
    strange = {name for name in printed if name.startswith(("builtins", "__builtin__", "os", "posix"))}
    assert strange == {"builtins.getattr", "__builtin__.getattr"}, "how early Python 3.11 writes a member of an enum"
