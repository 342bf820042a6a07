"""The report that this project began with, on two volumes of one machine: one run must say what took people days.

A disk of 267 MB/s and a fast one beside it; the kernel throttles the first as such a disk is slow: past the page cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_ckpt.judge.findings import phase_medians
from pytest_ckpt.records import Finding, SaveRecord
from pytest_ckpt.report.explain import read_records
from pytest_ckpt.units import format_seconds

from ..plugin.project import SUITE, Project
from ..volumes import LoopVolume, Throttle, loop_volume, throttle

DISK_BPS = 267_000_000
MODEL = "llama3-debug"
SIZE = 1536 * 2**20

UNSYNCED = """
from torch.distributed.checkpoint.filesystem import FileSystemWriter

def unsynced(path):
    return FileSystemWriter(path, sync_files=False)
"""


@dataclass
class Machine:
    """The volumes, and the control group in which the slow one is slow."""

    slow: LoopVolume
    fast: LoopVolume
    limit: Throttle
    project: Project

    def run(self, *arguments: str) -> tuple[str, dict[tuple[str, str], SaveRecord]]:
        """Run the suite inside the group; return what it printed, and its records by target and mode."""
        results = self.project.path / "results.json"
        command = [sys.executable, "-m", "pytest", *SUITE, f"--ckpt-model={MODEL}", "--ckpt-rounds=4"]
        done = self.project.run(*self.limit.command(*command, f"--benchmark-json={results}", "-v", *arguments))
        print(done.out)
        done.require(0)
        return done.out, {(r.target.label, r.scenario.mode): r for _, r in read_records(results)}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with loop_volume(SIZE) as slow, loop_volume(SIZE) as fast, throttle(slow, DISK_BPS) as limit:
        yield Machine(slow, fast, limit, Project(tmp_path_factory.mktemp("replay")))
        assert [*slow.mount.iterdir(), *fast.mount.iterdir()] == []


@dataclass
class Replay:
    out: str
    records: dict[tuple[str, str], SaveRecord]
    fast_mount: Path
    slow_mount: Path

    @property
    def slow(self) -> SaveRecord:
        return self.records["slow", "sync"]


@pytest.fixture(scope="module")
def replay(machine: Machine) -> Replay:
    targets = [f"--ckpt-target=slow={machine.slow.mount}", f"--ckpt-target=fast={machine.fast.mount}"]
    out, records = machine.run(*targets)
    return Replay(out, records, machine.fast.mount, machine.slow.mount)


def finding(record: SaveRecord, id: str) -> Finding:
    (found,) = (one for one in record.findings if one.id == id)
    return found


def test_slow_save_lies_between_its_bounds(replay: Replay) -> None:
    bounds = replay.slow.bounds
    assert bounds is not None
    assert bounds.largest == "storage"
    assert 0.85 * bounds.overlapped_s < replay.slow.save_s < 1.15 * bounds.serial_s


def test_slow_save_is_mostly_fsync(replay: Replay) -> None:
    assert phase_medians(replay.slow)["sync"] > 0.6 * replay.slow.save_s


def test_storage_is_named_as_the_bottleneck_with_its_measured_rate(replay: Replay) -> None:
    probes = replay.slow.probes
    assert probes is not None
    assert probes.write_direct_Bps == pytest.approx(DISK_BPS, rel=0.1)
    assert finding(replay.slow, "storage-bound").evidence["storage_Bps"] == pytest.approx(DISK_BPS, rel=0.1)
    assert replay.slow.bottleneck == "storage-bound"


def test_rate_of_the_page_cache_is_shown_as_not_durable(replay: Replay) -> None:
    """It was what misled people: the same on both disks."""
    for label in ("slow", "fast"):
        probes = replay.records[label, "sync"].probes
        assert probes is not None
        assert probes.write_buffered_Bps is not None
        assert probes.write_buffered_Bps > 2 * DISK_BPS
        (line,) = (line for line in replay.out.splitlines() if line.startswith(f"ckpt: probes of {label},"))
        assert line.count("(not durable)") == 1
        assert "B/s (not durable)" in line.partition("page cache")[2]


def test_other_volume_is_named_as_faster_with_its_mount_point_and_rate(replay: Replay) -> None:
    fast = replay.records["fast", "sync"].probes
    assert fast is not None
    for mode in ("sync", "async"):
        faster = finding(replay.records["slow", mode], "faster-volume-present")
        assert faster.evidence["mount"] == str(replay.fast_mount)
        assert faster.evidence["write_Bps"] == fast.storage_Bps(synced=True)
        assert str(replay.fast_mount) in faster.text
    assert str(replay.fast_mount) in finding(replay.slow, "storage-bound").advice


def test_fast_volume_is_not_blamed_for_the_throttled_one(replay: Replay) -> None:
    for mode in ("sync", "async"):
        record = replay.records["fast", mode]
        assert record.probes is not None
        assert record.bounds is not None
        own = record.probes.storage_Bps(synced=True)
        assert own is not None
        assert own > 1.5 * DISK_BPS
        assert record.bounds.storage_s == pytest.approx(record.logical_bytes / own)
        assert "faster-volume-present" not in [one.id for one in record.findings]
        for one in record.findings:
            assert str(replay.slow_mount) not in one.text + one.advice
            assert one.evidence.get("storage_Bps", own) == own


def test_async_save_takes_as_long_with_a_small_stall(replay: Replay) -> None:
    record = replay.records["slow", "async"]
    assert record.stall_s < 0.3 * replay.slow.save_s
    assert record.save_s == pytest.approx(replay.slow.save_s, rel=0.25)


def test_prediction_is_printed_before_the_first_save_and_holds(replay: Replay) -> None:
    predicted_s = replay.slow.predicted_s
    assert predicted_s == pytest.approx(replay.slow.save_s, rel=0.25)
    assert predicted_s is not None
    before, _, _ = replay.out.partition("PASSED")
    assert f"predicted sync save into slow: {format_seconds(predicted_s)} for {MODEL} (" in before
    assert "for llama3-8b (96.4 GB)" in before


def test_without_fsync_the_save_is_called_what_it_is(machine: Machine, replay: Replay) -> None:
    machine.project.write("unsynced_writer.py", UNSYNCED)
    _, records = machine.run(
        f"--ckpt-target=slow={machine.slow.mount}", "--ckpt-mode=sync", "--ckpt-writer=unsynced_writer:unsynced"
    )
    record = records["slow", "sync"]
    assert record.save_s < 0.5 * replay.slow.save_s
    found = finding(record, "page-cache-only")
    assert found.evidence["storage_Bps"] == pytest.approx(DISK_BPS, rel=0.15)
    assert {"storage-bound", "not-durable"}.isdisjoint(one.id for one in record.findings)
