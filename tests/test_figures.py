"""The figures of a run, each against an independent tool."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

STOPWATCH = """
import json, os, time
from torch.distributed.checkpoint import FileSystemWriter, state_dict_saver

def _time(name):
    original = getattr(state_dict_saver, name)
    def timed(*args, **kwargs):
        start = time.monotonic()
        result = original(*args, **kwargs)
        with open(os.environ["STOPWATCH"] + os.environ["RANK"], "a") as file:
            file.write(json.dumps([start, time.monotonic()]) + "\\n")
        return result
    setattr(state_dict_saver, name, timed)

_time("save")

def writer(path):
    return FileSystemWriter(path)

def test_own(ckpt_save, ckpt_world, ckpt_model):
    ckpt_save(mode="sync", writer=writer)
"""


def run(pytester: pytest.Pytester, *arguments: str) -> list[dict[str, Any]]:
    result = pytester.runpytest_subprocess("--benchmark-json=run.json", *arguments, timeout=240)
    assert result.ret == 0
    benchmarks: list[dict[str, Any]] = json.loads(Path("run.json").read_text())["benchmarks"]
    return benchmarks


@pytest.mark.parametrize("state", ["fp32-adamw", "mixed-adamw"])
def test_bytes_are_those_of_the_files_and_of_the_metadata(pytester: pytest.Pytester, state: str) -> None:
    """`folder_bytes` is what du counts, `stored_bytes` what `.metadata` refers to, `logical_bytes` the model's own."""
    target = pytester.mkdir("target")
    options = [f"--ckpt-target={target}", f"--ckpt-state={state}", "--ckpt-model=llama3-tiny", "--ckpt-keep=all"]
    benchmarks = run(pytester, "--pyargs", "pytest_ckpt.suites", "--ckpt-rounds=2", "--ckpt-mode=sync", *options)
    record = benchmarks[0]["extra_info"]["ckpt"]
    checkpoints = [path.parent for path in target.rglob(".metadata")]
    assert len(checkpoints) == 3  # one warm-up, two rounds
    for checkpoint in checkpoints:
        files = [str(path) for path in checkpoint.rglob("*") if path.is_file()]
        total = subprocess.run(["du", "-cb", "--apparent-size", *files], capture_output=True, text=True, check=True)
        assert int(total.stdout.splitlines()[-1].split()[0]) == record["folder_bytes"]
        metadata = FileSystemReader(str(checkpoint)).read_metadata()
        assert sum(info.length for info in metadata.storage_data.values()) == record["stored_bytes"]
    parameters = 918_144
    assert record["logical_bytes"] == parameters * {"fp32-adamw": 12, "mixed-adamw": 14}[state]
    assert record["logical_bytes"] < record["stored_bytes"] <= record["folder_bytes"]


def test_seconds_are_those_of_a_stopwatch_inside_the_ranks(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_stopwatch=STOPWATCH)
    monkeypatch.setenv("STOPWATCH", str(pytester.path / "stopwatch"))
    benchmarks = run(pytester, "--ckpt-model=llama3-tiny", "--ckpt-rounds=4")
    record = benchmarks[0]["extra_info"]["ckpt"]
    per_rank = [
        [json.loads(line) for line in (pytester.path / f"stopwatch{rank}").read_text().splitlines()] for rank in (0, 1)
    ]
    stopwatch = [
        max(end for _, end in readings) - min(start for start, _ in readings)
        for readings in zip(*per_rank, strict=True)
    ]
    assert [r["save_s"] for r in record["rounds"]] == pytest.approx(stopwatch[1:], abs=1e-3)
    assert record["first_save_s"] == pytest.approx(stopwatch[0], abs=1e-3)
    assert benchmarks[0]["stats"]["data"] == [r["save_s"] for r in record["rounds"]]


@pytest.mark.long
def test_other_files_of_a_target_stay_as_they_are_over_ten_runs_of_which_three_are_killed(
    pytester: pytest.Pytester,
) -> None:
    target = pytester.mkdir("target")
    (target / "sub").mkdir()
    for number, name in enumerate(("a.bin", "sub/b.bin", ".metadata", "pytest-ckpt-looks-alike")):
        (target / name).write_bytes(bytes([number]) * 10_000)
    (target / "link").symlink_to(target / "a.bin")
    before = listing(target)
    pytester.makepyfile(
        test_killed="""
        import os, signal

        def killer(path):
            if os.environ["RANK"] == "0":
                os.kill(os.getppid(), signal.SIGKILL)  # pytest itself, in the middle of a run
            raise AssertionError("not reached")

        def test_killed(ckpt_save):
            ckpt_save(mode="sync", writer=killer)
        """
    )
    options = [f"--ckpt-target={target}", "--ckpt-model=llama3-tiny", "--ckpt-ranks=1", "--benchmark-disable"]
    for number in range(10):
        if number in (2, 5, 8):
            killed = pytester.runpytest_subprocess("test_killed.py", *options, timeout=120)
            assert killed.ret == -9
        else:
            passed = pytester.runpytest_subprocess("--pyargs", "pytest_ckpt.suites", *options, timeout=120)
            assert passed.ret == 0
    assert len(re.findall(r"left by a killed run", passed.stdout.str())) == 3
    cleaned = pytester.run("pytest-ckpt", "clean", str(target))
    assert cleaned.ret == 0
    cleaned.stdout.fnmatch_lines("3 removed, *")
    assert listing(target) == before


def listing(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file with its mode, date and content."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.lstat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if not path.is_dir()
    }
