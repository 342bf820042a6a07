"""Write probes of one process: what they write, when they stop, and what they leave."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_ckpt.measure.io_probes import (
    LEAST_BYTES,
    Block,
    ProbeError,
    Reading,
    WriteMode,
    combine,
    copy_probe,
    write_probe,
    zeros_probe,
)

MIB = 2**20
MODES: tuple[WriteMode, ...] = ("direct", "buffered", "synced")
every_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def mounted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Mount the kind of file system that the test asks for."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount file systems")
    kind, options = request.param
    point = tmp_path / "mount"
    point.mkdir()
    mount = ["mount", "-t", kind, "-o", options, "test", str(point)]
    made = subprocess.run(mount, capture_output=True, text=True, timeout=5, check=False)
    if made.returncode != 0:
        pytest.skip(f"{kind} cannot be mounted here: {made.stderr.strip()}")
    yield point
    subprocess.run(["umount", str(point)], check=True, timeout=5)


class SlowDisk:
    """A clock, and an `os.write` and `os.fsync` that take time on it: `burst_bytes` fast, then `Bps`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, Bps: float, burst_bytes: int = 0) -> None:
        self.now_s, self.written, self.syncs = 0.0, 0, 0
        self.sizes: list[int] = []
        self._Bps, self._burst_bytes = Bps, burst_bytes
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "fsync", self.fsync)

    def clock(self) -> float:
        return self.now_s

    def write(self, fd: int, data: memoryview) -> int:
        self.sizes.append(len(data))
        slow = max(0, self.written + len(data) - max(self.written, self._burst_bytes))
        self.written += len(data)
        self.now_s += (len(data) - slow) / 10e9 + slow / self._Bps
        return len(data)

    def fsync(self, fd: int) -> None:
        self.syncs += 1


@every_mode
def test_probe_writes_what_it_may_and_leaves_nothing(tmp_path: Path, mode: WriteMode) -> None:
    reading = write_probe(mode, str(tmp_path / "file"), max_bytes=5 * MIB + 1, max_seconds=30)
    if reading.refused:
        pytest.skip(reading.refused)
    assert reading.bytes == 5 * MIB
    assert reading.end_s > reading.start_s
    assert LEAST_BYTES <= reading.block_bytes <= 5 * MIB
    assert os.listdir(tmp_path) == []


def test_no_page_is_written_twice_or_can_be_compressed() -> None:
    block = Block(MIB)
    seen = set()
    for _ in range(20):
        data = bytes(block.fresh(MIB))
        seen |= {data[start : start + 4096] for start in range(0, MIB, 4096)}
    assert len(seen) == 20 * MIB // 4096
    assert len(zlib.compress(data, 1)) > 0.99 * MIB


@every_mode
def test_only_the_synced_probe_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: WriteMode) -> None:
    disk = SlowDisk(monkeypatch, Bps=1e9)
    reading = write_probe(mode, str(tmp_path / "file"), max_bytes=256 * MIB, max_seconds=1, clock=disk.clock)
    if reading.refused:
        pytest.skip(reading.refused)
    assert (disk.syncs > 0) == (mode == "synced")


@every_mode
@pytest.mark.parametrize("Bps", [1e6, 30e6, 267e6, 5e9])
def test_time_is_overrun_by_one_unit_or_by_the_least_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: WriteMode, Bps: float
) -> None:
    disk = SlowDisk(monkeypatch, Bps)
    reading = write_probe(mode, str(tmp_path / "file"), max_bytes=2**40, max_seconds=3, clock=disk.clock)
    if reading.refused:
        pytest.skip(reading.refused)
    assert 3 <= reading.end_s - reading.start_s <= 3 * (1.25 if mode == "synced" else 1.1) + LEAST_BYTES / Bps
    assert reading.bytes / (reading.end_s - reading.start_s) == pytest.approx(Bps)


@every_mode
def test_time_is_overrun_by_one_unit_where_a_burst_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: WriteMode
) -> None:
    disk = SlowDisk(monkeypatch, Bps=30e6, burst_bytes=200 * MIB)
    reading = write_probe(mode, str(tmp_path / "file"), max_bytes=2**40, max_seconds=3, clock=disk.clock)
    if reading.refused:
        pytest.skip(reading.refused)
    assert reading.end_s - reading.start_s <= 3 + 64 * MIB / 30e6
    assert max(disk.sizes) <= 16 * MIB


def test_all_ranks_use_the_least_unit_that_any_of_them_found(tmp_path: Path) -> None:
    reading = write_probe(
        "buffered", str(tmp_path / "file"), max_bytes=8 * MIB, max_seconds=9, agree=lambda count: LEAST_BYTES
    )
    assert reading.block_bytes == LEAST_BYTES


@pytest.mark.parametrize("mounted", [("ramfs", "rw")], indirect=True)
def test_file_system_without_direct_writes_is_an_answer_and_no_failure(mounted: Path) -> None:
    given = []

    def agree(count: int) -> int:
        given.append(count)
        return count

    reading = write_probe("direct", str(mounted / "file"), max_bytes=MIB, max_seconds=1, agree=agree)
    assert reading.refused == "the file system refuses O_DIRECT (EINVAL: Invalid argument)"
    assert given == [0]  # the other ranks are told
    assert os.listdir(mounted) == []
    probe = combine("write_direct", [reading, reading])
    assert (probe.Bps, probe.per_rank_Bps, probe.note) == (None, [], reading.refused)


def test_direct_write_that_is_refused_only_when_it_is_tried_is_the_same_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, data: memoryview) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "write", refuse)
    reading = write_probe("direct", str(tmp_path / "file"), max_bytes=MIB, max_seconds=1)
    assert reading.refused is not None
    assert os.listdir(tmp_path) == []
    with pytest.raises(ProbeError, match="EINVAL"):
        write_probe("buffered", str(tmp_path / "file"), max_bytes=MIB, max_seconds=1)


def test_rank_whose_neighbour_was_refused_writes_nothing(tmp_path: Path) -> None:
    reading = write_probe("direct", str(tmp_path / "file"), max_bytes=MIB, max_seconds=1, agree=lambda count: 0)
    assert (reading.bytes, reading.refused is not None) == (0, True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("mounted", [("tmpfs", "size=8m")], indirect=True)
@every_mode
def test_full_target_is_told_with_the_figures(mounted: Path, mode: WriteMode) -> None:
    with pytest.raises(ProbeError) as failed:
        write_probe(mode, str(mounted / "file"), max_bytes=64 * MIB, max_seconds=10)
    assert str(failed.value) == (
        f"the {mode} write probe in {mounted} failed after 8.39 MB of this process: "
        "ENOSPC No space left on device (0 B free there)"
    )
    assert os.listdir(mounted) == []


@pytest.fixture
def _file_size_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@every_mode
@pytest.mark.usefixtures("_file_size_limit")
def test_failed_write_is_told_without_root_too(tmp_path: Path, mode: WriteMode) -> None:
    with pytest.raises(ProbeError, match=f"the {mode} write probe in .* failed after .* MB .*: EFBIG File too large"):
        write_probe(mode, str(tmp_path / "file"), max_bytes=8 * MIB, max_seconds=10)
    assert os.listdir(tmp_path) == []


def test_file_that_was_there_is_neither_overwritten_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ProbeError, match="EEXIST"):
        write_probe("buffered", str(tmp_path / "mine"), max_bytes=MIB, max_seconds=1)
    assert (tmp_path / "mine").read_text() == "mine"


def test_rate_of_all_ranks_is_their_bytes_from_the_first_start_to_the_last_end() -> None:
    first = Reading(bytes=300, start_s=10.0, end_s=12.0, block_bytes=100, note="a")
    second = Reading(bytes=300, start_s=11.0, end_s=14.0, block_bytes=100, note="a")
    probe = combine("copy", [first, second])
    assert (probe.bytes, probe.seconds, probe.Bps) == (600, 4.0, 150.0)
    assert probe.per_rank_Bps == [150.0, 100.0]
    assert probe.note == "a"


def test_zeros_are_written_up_to_the_bound(tmp_path: Path) -> None:
    probe = zeros_probe(str(tmp_path / "zeros"), max_bytes=3 * MIB + 5, max_seconds=30)
    assert probe.bytes == 3 * MIB + 5
    assert "not durable" in probe.note
    assert os.listdir(tmp_path) == []


def test_copy_reads_the_regular_files_of_a_checkpoint_and_follows_no_link(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint"
    (source / "deeper").mkdir(parents=True)
    (source / "shard").write_bytes(os.urandom(3 * MIB + 1))
    (source / "deeper" / "shard").write_bytes(b"x" * 10)
    (source / "link").symlink_to(source / "shard")
    probe = copy_probe(str(source), str(tmp_path / "copy"))
    assert probe.bytes == 3 * MIB + 11
    bounded = copy_probe(str(source), str(tmp_path / "copy"), max_bytes=MIB)
    assert bounded.bytes == MIB
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_copy_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ProbeError, match="saved checkpoint"):
        copy_probe(str(tmp_path / "empty"), str(tmp_path / "copy"))
    with pytest.raises(ProbeError, match="saved checkpoint"):
        copy_probe(str(tmp_path / "none"), str(tmp_path / "copy"))


def test_block_is_aligned_as_direct_writes_want_it() -> None:
    data = Block(MIB).fresh(LEAST_BYTES)
    assert ctypes.addressof(ctypes.c_char.from_buffer(data)) % 4096 == 0
    assert len(data) == LEAST_BYTES
