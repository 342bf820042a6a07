"""The probes over real ranks, on tmpfs, on disk, and on a volume that the kernel holds to a known rate."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch

from pytest_ckpt.records import Probe, Probes
from pytest_ckpt.save.probes import BLOCK_BYTES, OPERATIONS, Nowhere
from pytest_ckpt.target.interface import WorkFolder
from pytest_ckpt.target.path import PathTarget
from pytest_ckpt.target.spec import TargetSpec
from pytest_ckpt.world.context import Rank
from pytest_ckpt.world.interface import RankFailure
from pytest_ckpt.world.probing import HOST_PROBES, STORAGE_PROBES, run_misleading_probes, run_probes
from pytest_ckpt.world.spawned import SpawnedWorld

from ..volumes import LoopVolume, Throttle, loop_volume, throttle

ROOT = Path(__file__).parents[2]
MIB = 2**20
SLOW_BPS = 30_000_000
SLOW_SECONDS = 2.0


class Steps:
    """A `Progress` that remembers."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, str | None, int]] = []
        self.at_s: list[float] = []
        self.ended = False

    def step(self, what: str, location: str | None, expected_bytes: int) -> None:
        self.steps.append((what, location, expected_bytes))
        self.at_s.append(time.monotonic())

    def poll(self) -> None:
        pass

    def done(self) -> None:
        self.ended = True


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WorkFolder]:
    place = tmp_path
    if request.param == "tmpfs":
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("there is no tmpfs at /dev/shm")
        place = Path(tempfile.mkdtemp(dir="/dev/shm"))
    folder = PathTarget(TargetSpec("probed", str(place))).open()
    yield folder
    folder.close()
    place.rmdir()


def test_every_probe_is_of_all_ranks_and_says_its_bytes_seconds_and_block(
    world: SpawnedWorld, folder: WorkFolder
) -> None:
    steps = Steps()
    probes = run_probes(world, folder, steps, max_bytes=96 * MIB, max_seconds=3.0)
    assert [probe.name for probe in probes.details] == [*STORAGE_PROBES, *HOST_PROBES]
    assert probes.world_size == 2
    for probe in probes.details:
        if probe.Bps is None:
            assert probe.name == "write_direct"
            assert "O_DIRECT" in probe.note
            continue
        assert probe.bytes == (96 * MIB if probe.name in STORAGE_PROBES else 160 * MIB) or probe.seconds > 3.0
        assert probe.Bps == pytest.approx(probe.bytes / probe.seconds)
        assert len(probe.per_rank_Bps) == 2
        assert sum(probe.per_rank_Bps) >= probe.Bps * 0.999
        assert 0 < probe.block_bytes <= 40 * MIB
    assert [probes.write_direct_Bps, probes.serialize_Bps] == [probes.details[0].Bps, probes.details[5].Bps]
    assert (probes.d2h_pinned_Bps, probes.d2h_pageable_Bps) == (None, None)
    assert len(steps.steps) == 6
    assert steps.ended


def test_nothing_is_left_in_the_work_folder(world: SpawnedWorld, folder: WorkFolder) -> None:
    before = sorted(os.listdir(folder.location))
    run_probes(world, folder, Steps(), max_bytes=2 * MIB, max_seconds=1.0)
    run_misleading_probes(folder, folder.location, max_bytes=2 * MIB)
    assert sorted(os.listdir(folder.location)) == before


def test_figures_of_the_host_are_measured_once_for_several_targets(world: SpawnedWorld, tmp_path: Path) -> None:
    folder = PathTarget(TargetSpec("probed", str(tmp_path))).open()
    steps = Steps()
    first = run_probes(world, folder, Steps(), max_bytes=2 * MIB, max_seconds=1.0)
    second = run_probes(world, folder, steps, max_bytes=2 * MIB, max_seconds=1.0, host=first)
    folder.close()
    assert len(steps.steps) == len(STORAGE_PROBES)
    assert (second.copy_Bps, second.serialize_Bps) == (first.copy_Bps, first.serialize_Bps)
    assert [probe.name for probe in second.details] == [probe.name for probe in first.details]


def limit_file_size(rank: Rank, limit: int) -> None:
    """Let rank 1 write no more than `limit` bytes to one file: a full disk on one rank."""
    if rank.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def test_rank_that_cannot_write_is_named_and_its_bytes_are_removed(tmp_path: Path) -> None:
    world = SpawnedWorld(2, timeout_s=60)
    folder = PathTarget(TargetSpec("probed", str(tmp_path))).open()
    try:
        world.run(limit_file_size, limit=8 * MIB)
        with pytest.raises(RankFailure) as failed:
            run_probes(world, folder, Steps(), max_bytes=64 * MIB, max_seconds=3.0)
        assert [f.rank for f in failed.value.culprits] == [1]
        assert "EFBIG" in failed.value.culprits[0].cause
        assert "probe" in failed.value.culprits[0].phase
        assert [name for name in os.listdir(folder.location) if "probe" in name] == []
    finally:
        world.close()
        folder.close()


@pytest.fixture(scope="module")
def slow_volume() -> Iterator[tuple[LoopVolume, Throttle]]:
    with loop_volume(600 * MIB) as volume, throttle(volume, SLOW_BPS) as limit:
        yield volume, limit


class Throttled(msgspec.Struct):
    """What the program below says."""

    probes: Probes
    zeros: Probe
    wall_s: list[float]
    """Of each probe, with all that is not timed: making data and files, finding the unit, removing."""


def probe_throttled(place: str) -> None:
    """Probe with a new world, and print what came of it."""
    world = SpawnedWorld(2, timeout_s=120)
    folder = PathTarget(TargetSpec("slow", place)).open()
    steps = Steps()
    try:
        world.run(limit_file_size, limit=-1)  # the ranks are up when the first probe begins
        probes = run_probes(world, folder, steps, max_bytes=256 * MIB, max_seconds=SLOW_SECONDS)
        (zeros,) = run_misleading_probes(folder, max_bytes=128 * MIB)
    finally:
        world.close()
        folder.close()
    wall_s = [after - before for before, after in pairwise(steps.at_s)]
    print(msgspec.json.encode(Throttled(probes, zeros, wall_s)).decode())


@pytest.fixture(scope="module")
def throttled(slow_volume: tuple[LoopVolume, Throttle]) -> Throttled:
    """Controller and ranks are all inside the control group, as the limit holds for who submits the writes."""
    volume, limit = slow_volume
    program = f"from tests.world.test_probing import probe_throttled; probe_throttled({str(volume.mount)!r})"
    done = subprocess.run(
        limit.command(sys.executable, "-c", program), cwd=ROOT, check=True, timeout=120, stdout=subprocess.PIPE
    )
    assert os.listdir(volume.mount) == []
    return msgspec.json.decode(done.stdout, type=Throttled)


def test_direct_rate_of_a_throttled_volume_is_the_throttle(throttled: Throttled) -> None:
    assert throttled.probes.write_direct_Bps == pytest.approx(SLOW_BPS, rel=0.1)


def test_synced_rate_of_a_throttled_volume_is_near_the_throttle(throttled: Throttled) -> None:
    assert throttled.probes.write_synced_Bps == pytest.approx(SLOW_BPS, rel=0.25)


def test_buffered_writes_and_zeros_hide_the_throttle(throttled: Throttled) -> None:
    buffered = throttled.probes.write_buffered_Bps
    assert buffered is not None
    assert buffered > 5 * SLOW_BPS
    assert throttled.zeros.Bps is not None
    assert throttled.zeros.Bps > 5 * SLOW_BPS


def test_time_of_a_probe_is_bounded_on_a_slow_volume(throttled: Throttled) -> None:
    for probe in throttled.probes.details:
        assert probe.seconds < SLOW_SECONDS * 1.25, probe.name
    for wall_s in throttled.wall_s:
        assert wall_s < SLOW_SECONDS + 3


def test_copy_is_into_fresh_memory_and_the_warm_one_is_not() -> None:
    """The kernel counts a fault for each page, small or huge, that is touched for the first time."""
    faults = {}
    for name in ("copy", "copy_warm"):
        work, _ = OPERATIONS[name](torch.device("cpu"))
        work()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        work()
        faults[name] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults["copy"] >= BLOCK_BYTES // (2 * MIB)
    assert faults["copy_warm"] < BLOCK_BYTES // (2 * MIB)


def test_what_is_serialised_to_nowhere_is_not_kept() -> None:
    sink = Nowhere()
    torch.save(torch.ones(1000), sink)
    assert sink.getbuffer().nbytes == 0


def test_probe_takes_at_most_half_of_the_free_space(
    slow_volume: tuple[LoopVolume, Throttle], world: SpawnedWorld
) -> None:
    """The test's own process is outside the control group, so nothing is slow here."""
    folder = PathTarget(TargetSpec("small", str(slow_volume[0].mount))).open()
    free = os.statvfs(folder.location)
    probes = run_probes(world, folder, Steps(), max_bytes=2**40, max_seconds=5.0)
    folder.close()
    for probe in probes.details[: len(STORAGE_PROBES)]:
        assert probe.bytes <= free.f_bavail * free.f_frsize // 2
