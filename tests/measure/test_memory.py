"""Memory figures are the kernel's own."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pytest_ckpt.measure import memory
from pytest_ckpt.measure.memory import PeakMemory, available_memory_bytes

MIB = 2**20


def test_peak_is_what_was_held_at_once_and_not_what_is_left() -> None:
    peak = PeakMemory()
    peak.start()
    block = bytearray(200 * MIB)
    block[:: resource.getpagesize()] = b"x" * len(range(0, len(block), resource.getpagesize()))
    del block
    measured = peak.stop()
    assert measured is not None
    assert 199 * MIB <= measured < 240 * MIB  # each thread's last 64 pages may not be counted yet


def test_an_earlier_peak_is_forgotten() -> None:
    block = bytearray(b"x") * (200 * MIB)
    del block
    peak = PeakMemory()
    peak.start()
    measured = peak.stop()
    assert measured is not None
    assert measured < 20 * MIB


def test_peak_agrees_with_the_accounting_of_the_operating_system() -> None:
    """The kernel reports the same high-water mark to whoever waits for a process (wait4(2), as /usr/bin/time does)."""
    program = (
        "from pytest_ckpt.measure.memory import PeakMemory, _status_bytes\n"
        "peak = PeakMemory(); peak.start(); before = _status_bytes('VmRSS')\n"
        "block = bytearray(b'x') * (300 * 2**20)\n"
        "del block\n"
        "print(before + peak.stop())\n"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    waited = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    assert int(child.stdout) <= waited * 1.02
    assert int(child.stdout) > 300 * MIB


def test_peak_is_unknown_where_the_kernel_does_not_let_it_be_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, text: str) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_text", refuse)
    peak = PeakMemory()
    peak.start()
    assert peak.stop() is None


@pytest.mark.parametrize("group", ["/", "/job", "/slurm/job/step"])
@pytest.mark.parametrize("controller", ["", "memory"])
def test_a_control_groups_limit_counts_where_it_is_less_than_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, controller: str
) -> None:
    """The limit may be the process's own group's, or that of any group around it."""
    own = tmp_path / group.strip("/")
    own.mkdir(parents=True, exist_ok=True)
    (tmp_path / "groups").write_text(f"7:cpu:/elsewhere\n3:{controller}:{group}\n")
    monkeypatch.setattr(memory, "_GROUPS", str(tmp_path / "groups"))
    monkeypatch.setattr(memory, "_CGROUP_FILES", ((str(tmp_path), controller, "limit", "usage"),))
    assert available_memory_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    for folder in dict.fromkeys((tmp_path, own)):
        (folder / "usage").write_text("500000000\n")
        (folder / "memory.stat").write_text("anon 400000000\ninactive_file 100000000\n")
        (folder / "limit").write_text("max\n")
    assert available_memory_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    for folder in dict.fromkeys((tmp_path, own)):
        (folder / "limit").write_text("1000000000\n")
        assert available_memory_bytes() == 600_000_000
        (folder / "limit").write_text("max\n")
