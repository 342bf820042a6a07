"""What safetensors' own reader refuses is not called complete, and what its own writer leaves is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.state_dict_saver import save

from pytest_ckpt.accept.verify import verify
from pytest_ckpt.plugin.command import main
from pytest_ckpt.records import Verification

from .damage import flip

pytestmark = pytest.mark.timeout(120)


def tensor(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}


def file_of(header: object, data: bytes = b"", *, text: str = "") -> bytes:
    described = (text or json.dumps(header)).encode()
    return len(described).to_bytes(8, "little") + described + data


def verified(folder: Path, content: bytes) -> Verification:
    (folder / "model.safetensors").write_bytes(content)
    return verify(str(folder))


REFUSED = {
    "bytes-behind": (file_of({"a": tensor(0, 4)}, bytes(5)), "size-differs"),
    "bytes-before": (file_of({"a": tensor(4, 8)}, bytes(8)), "hole"),
    "bytes-between": (file_of({"a": tensor(0, 4), "b": tensor(8, 12)}, bytes(12)), "hole"),
    "same-bytes": (file_of({"a": tensor(0, 4), "b": tensor(0, 4)}, bytes(4)), "overlap"),
    "empty-inside": (file_of({"a": tensor(0, 4), "b": tensor(2, 2)}, bytes(4)), "overlap"),
    "name-twice": (
        file_of(0, bytes(8), text=f'{{"a": {json.dumps(tensor(0, 4))}, "a": {json.dumps(tensor(4, 8))}}}'),
        "corrupt-header",
    ),
    "no-unicode": (file_of({"\ud800x": tensor(0, 4)}, bytes(4)), "corrupt-header"),
    "metadata-no-text": (file_of({"a": tensor(0, 4), "__metadata__": {"x": 1}}, bytes(4)), "corrupt-header"),
    "no-dtype": (file_of({"a": {**tensor(0, 4), "dtype": "F33"}}, bytes(4)), "corrupt-header"),
    "utf-16": (
        len('{"a": 0}').to_bytes(8, "little") + '{"a"'.encode("utf-16-le") + bytes(4),
        "corrupt-header",
    ),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_what_the_formats_own_reader_refuses_is_named(damage: str, tmp_path: Path) -> None:
    content, kind = REFUSED[damage]
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load(content)
    found = verified(tmp_path, content)
    assert [problem.kind for problem in found.problems] == [kind]


def test_what_the_formats_own_writer_leaves_is_complete(tmp_path: Path) -> None:
    state = {"b": torch.ones(3), "a": torch.zeros(0), "c": torch.ones(5, dtype=torch.bool), "d": torch.tensor(1.0)}
    assert verified(tmp_path, safetensors.torch.save(state)).outcome == "no-checksum"
    assert verified(tmp_path, safetensors.torch.save(state, metadata={"format": "pt"})).outcome == "no-checksum"
    assert verified(
        tmp_path, file_of({"a": tensor(0, 4), "z": tensor(4, 4), "__metadata__": None}, bytes(4))
    ).is_complete


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_inserted_removed_or_changed_bytes_that_it_refuses_are_called_complete(
    data: st.DataObject, tmp_path: Path
) -> None:
    before = safetensors.torch.save({"a": torch.ones(3), "b": torch.ones(2, 2), "c": torch.ones(1).half()})
    at = data.draw(st.integers(0, len(before)))
    instead = data.draw(st.binary(max_size=3) | st.sampled_from([b" ", b"0", b'"', b"1"]))
    after = before[:at] + instead + before[at + data.draw(st.integers(0, 3)) :]
    found = verified(tmp_path, after)
    try:
        safetensors.deserialize(after)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        assert not found.is_complete


def test_bytes_behind_the_safetensors_in_a_file_of_dcp_are_found(tmp_path: Path) -> None:
    """DCP writes objects in front of them, in the same file."""
    writer = FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    save({"weight": torch.ones(3, 4), "bias": torch.ones(5), "step": 7}, storage_writer=writer, no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    assert file.read_bytes()[:2] == b"PK"
    assert verify(str(tmp_path)).outcome == "no-checksum"
    file.write_bytes(file.read_bytes() + b"x")
    found = verify(str(tmp_path), ignore_times=True)
    assert [(problem.kind, problem.file) for problem in found.problems] == [("size-differs", file.name)]


def test_a_damaged_first_sign_of_a_header_does_not_make_it_pass_for_elements(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    save({"weight": torch.ones(3, 4)}, storage_writer=writer, no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    assert verify(str(tmp_path)).outcome == "no-checksum"
    flip(file, 8)
    assert verify(str(tmp_path)).outcome == "corrupt-header"


def test_names_that_are_no_utf_8_are_written_out_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save({"weight": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    (tmp_path / b"\xff\xfe.distcp".decode("utf-8", "surrogateescape")).write_bytes(b"left")
    assert main(["verify", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["orphans"] == [{"file": "\\udcff\\udcfe.distcp", "bytes": 4}]
    assert main(["verify", str(tmp_path)]) == 0
