"""Phase `sync` is the time that the kernel spends in fsync, as strace sees it from outside."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import msgspec
import pytest

from pytest_ckpt.measure.spans import RankTrace, phase_seconds, thread_seconds, timelines

ROOT = Path(__file__).parents[2]
STATE_BYTES = 64 * 2**20
_CALL = re.compile(r"(?P<thread>\d+) +(?:fsync|fdatasync)\(\d+<(?P<path>[^>]*)>.*<(?P<seconds>[\d.]+)>$")
_UNFINISHED = re.compile(r"(?P<thread>\d+) +(?:fsync|fdatasync)\(\d+<(?P<path>[^>]*)> *<unfinished \.\.\.>$")
_RESUMED = re.compile(r"(?P<thread>\d+) +<\.\.\. (?:fsync|fdatasync) resumed>.*<(?P<seconds>[\d.]+)>$")


def save_traced(location: str, threads: int) -> None:
    """Save from one rank alone and print its trace: what runs below strace."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    from pytest_ckpt.save.trace import SaveTrace

    state = {str(number): torch.rand(STATE_BYTES // 8 // 4) for number in range(8)}
    writer, tracer = FileSystemWriter(location, thread_count=threads), SaveTrace()
    assert tracer.watch_writer(writer)
    with warnings.catch_warnings(), tracer.running():
        warnings.simplefilter("ignore")  # that there is one process only
        called_s = time.monotonic()
        save(state, storage_writer=writer, planner=tracer.planner(), no_dist=True)
        completed_s = time.monotonic()
    print(msgspec.json.encode(tracer.result(called_s, completed_s, completed_s)).decode())


def strace_seconds(log: Path) -> dict[str, float]:
    """Return the seconds of the fsync of each file."""
    seconds: dict[str, float] = {}
    open_calls: dict[str, str] = {}
    for line in log.read_text().splitlines():
        if call := _CALL.match(line):
            seconds[call["path"]] = seconds.get(call["path"], 0.0) + float(call["seconds"])
        elif call := _UNFINISHED.match(line):
            open_calls[call["thread"]] = call["path"]
        elif call := _RESUMED.match(line):
            path = open_calls.pop(call["thread"])
            seconds[path] = seconds.get(path, 0.0) + float(call["seconds"])
    return seconds


def traced_below_strace(folder: Path, threads: int) -> tuple[RankTrace, dict[str, float]]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    log, place = folder / "strace", folder / "save"
    program = f"from tests.measure.test_against_strace import save_traced; save_traced({str(place)!r}, {threads})"
    command = ["strace", "-f", "-T", "-y", "--seccomp-bpf", "-e", "trace=fsync,fdatasync", "-o", str(log)]
    done = subprocess.run(
        [*command, sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    if "ptrace" in done.stderr and done.returncode:
        pytest.skip(f"strace may not trace here: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=RankTrace), strace_seconds(log)


def agrees(measured_s: float, strace_s: float) -> bool:
    return abs(measured_s - strace_s) <= max(0.05 * strace_s, 0.02)


def test_phase_sync_is_what_strace_measures_of_fsync(tmp_path: Path) -> None:
    trace, by_file = traced_below_strace(tmp_path, threads=1)
    data = [seconds for path, seconds in by_file.items() if path.endswith(".distcp")]
    assert len(data) == 1
    (path,) = timelines([trace])
    assert agrees(phase_seconds(path)["sync"], sum(data)), (phase_seconds(path), by_file)


def test_each_fsync_of_several_threads_is_noted_with_its_own_time(tmp_path: Path) -> None:
    trace, by_file = traced_below_strace(tmp_path, threads=4)
    assert len(by_file) == len(trace.syncs) == 5  # of them one is the metadata's
    noted = sorted(sync.end_s - sync.start_s for sync in trace.syncs)
    for measured_s, strace_s in zip(noted, sorted(by_file.values()), strict=True):
        assert agrees(measured_s, strace_s), (noted, by_file)
    assert thread_seconds(trace)["sync"] == pytest.approx(sum(noted))
