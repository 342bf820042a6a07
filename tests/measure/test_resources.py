"""Counters of processes, devices and the page cache agree with the kernel's own files and with the files written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pytest_ckpt.measure.resources import BlockDevices, PageCacheWatch, ProcessUsage
from pytest_ckpt.records import Round
from pytest_ckpt.save.writers import file_system_writer
from pytest_ckpt.target.path import PathTarget
from pytest_ckpt.target.spec import TargetSpec
from pytest_ckpt.world.functions import reference
from pytest_ckpt.world.rounds import RoundsPlan, Saving, measure_rounds
from pytest_ckpt.world.spawned import SpawnedWorld

from ..volumes import LoopVolume, loop_volume
from ..world.fakes import FakeProgress

MIB = 2**20
SLACK_BYTES = 2 * MIB
"""What a file system writes of its own: folders, journal, tables."""


def uneven(mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """Each rank's keys are its own; rank 1 has twice as much."""
    rank = dist.get_rank()
    return {f"{rank}.{number}": torch.rand(2 * MIB) for number in range(4 * (rank + 1))}


@pytest.fixture(scope="module")
def volume() -> Iterator[LoopVolume]:
    with loop_volume(512 * MIB) as volume:
        yield volume


def process_write_bytes(pid: int) -> int:
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["write_bytes"])


def device_stat(volume: LoopVolume) -> tuple[int, int]:
    """Return the sectors written and the milliseconds with requests in flight."""
    fields = Path(f"/sys/dev/block/{volume.number}/stat").read_text().split()
    return int(fields[6]), int(fields[9])


class Measured:
    """One round of two ranks on a volume of its own, with what the kernel says of it from outside."""

    def __init__(self, volume: LoopVolume) -> None:
        world = SpawnedWorld(2, timeout_s=60)
        folder = PathTarget(TargetSpec("measured", str(volume.mount))).open()
        saving = Saving(
            mode="sync",
            writer=reference(file_system_writer, "writer"),
            model="own",
            state="user",
            function=reference(uneven, "model"),
        )

        def measure(**plan: Any) -> Round:
            wanted = RoundsPlan(rounds=1, max_time_s=60, single=True, devices=[volume.number], **plan)
            (one,) = measure_rounds(world, folder, saving, wanted, FakeProgress()).rounds
            return one

        try:
            measure()  # the state is there and the ranks are warm
            os.sync()
            processes, disk = [process_write_bytes(pid) for pid in world.pids], device_stat(volume)
            self.round = measure(keep_all=True)
            after = [process_write_bytes(pid) for pid in world.pids]
            self.written = [now - then for now, then in zip(after, processes, strict=True)]
            sectors, busy_ms = (now - then for now, then in zip(device_stat(volume), disk, strict=True))
            self.device_bytes, self.device_busy_s = sectors * 512, busy_ms / 1000
            self.files = [
                sum(file.stat().st_size for file in Path(folder.location).rglob(f"__{rank}_*.distcp"))
                for rank in range(2)
            ]
        finally:
            world.close()
            folder.close()


@pytest.fixture(scope="module")
def measured(volume: LoopVolume) -> Measured:
    return Measured(volume)


def test_bytes_of_each_rank_are_those_of_its_files(measured: Measured) -> None:
    assert [rank.item_bytes for rank in measured.round.ranks] == measured.files
    assert measured.files[1] == pytest.approx(2 * measured.files[0], rel=0.01)


def test_bytes_sent_to_storage_are_what_the_kernel_counts_for_the_process(measured: Measured) -> None:
    for rank, written, file in zip(measured.round.ranks, measured.written, measured.files, strict=True):
        assert rank.write_bytes is not None
        assert rank.write_bytes == pytest.approx(written, abs=SLACK_BYTES)
        assert rank.write_bytes == pytest.approx(file, abs=SLACK_BYTES)


def test_bytes_of_the_device_are_what_the_kernel_counts_for_it(measured: Measured) -> None:
    assert measured.round.device_written_bytes is not None
    assert measured.round.device_written_bytes == pytest.approx(measured.device_bytes, abs=SLACK_BYTES)
    assert measured.round.device_written_bytes == pytest.approx(sum(measured.files), abs=SLACK_BYTES)


def test_busy_share_is_of_the_round(measured: Measured) -> None:
    share = measured.round.device_busy_share
    assert share is not None
    assert 0 < share <= 1
    assert share * measured.round.save_s <= measured.device_busy_s + 0.02


def test_cpu_seconds_are_those_of_the_process() -> None:
    usage = ProcessUsage()
    usage.start()
    began = time.process_time()
    while time.process_time() - began < 0.2:
        pass
    cpu_s, _ = usage.stop()
    assert cpu_s == pytest.approx(time.process_time() - began, abs=0.05)


def test_devices_without_counters_say_nothing() -> None:
    assert BlockDevices([]).since() is None
    assert BlockDevices(["0:0"]).since() is None


def test_page_cache_watch_sees_what_waits_for_write_back(volume: LoopVolume) -> None:
    """Others on the machine write, too: what waits is at least what was written just now."""
    path = volume.mount / "dirty"
    before, watch = PageCacheWatch(), PageCacheWatch()
    before.look()
    path.write_bytes(os.urandom(64 * MIB))
    watch.look()
    path.unlink()
    assert watch.dirty_peak_bytes >= 60 * MIB
    assert watch.least_available_bytes is not None
    assert before.least_available_bytes is not None


def test_counters_cost_little() -> None:
    """They are read twice in a round, and the page cache five times a second."""
    began = time.perf_counter()
    for _ in range(100):
        usage, watch = ProcessUsage(), PageCacheWatch()
        usage.start()
        watch.look()
        usage.stop()
    assert (time.perf_counter() - began) / 100 < 0.002
