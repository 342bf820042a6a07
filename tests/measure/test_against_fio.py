"""The direct probe says what fio says, the tool that people would check it with."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pytest_ckpt.measure.io_probes import Reading, combine
from pytest_ckpt.records import Probe
from pytest_ckpt.world.probing import probe_rank
from pytest_ckpt.world.spawned import SpawnedWorld

RANKS = 2
MAX_BYTES = 768 * 2**20
PAIRS = 7

pytestmark = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")


@pytest.fixture(scope="module")
def world() -> Iterator[SpawnedWorld]:
    world = SpawnedWorld(RANKS, timeout_s=60)
    yield world
    world.close()


def probe(world: SpawnedWorld, folder: Path) -> Probe:
    replies = world.run(
        probe_rank, name="write_direct", location=str(folder), max_bytes=MAX_BYTES // RANKS, max_seconds=30.0
    )
    return combine("write_direct", msgspec.convert(replies, list[Reading]))


def fio_Bps(folder: Path, block_bytes: int) -> float:
    command = ["fio", "--name=probe", f"--directory={folder}", "--rw=write", "--direct=1", "--ioengine=psync"]
    command += [f"--numjobs={RANKS}", f"--bs={block_bytes}", f"--size={MAX_BYTES // RANKS}", "--fallocate=none"]
    command += ["--group_reporting", "--output-format=json"]
    done = subprocess.run(command, check=True, capture_output=True, timeout=60)
    for path in folder.glob("probe.*"):
        path.unlink()
    return float(json.loads(done.stdout)["jobs"][0]["write"]["bw_bytes"])


def test_direct_rate_agrees_with_fio(world: SpawnedWorld, tmp_path: Path) -> None:
    """Median of the ratios of paired runs, as the disks of shared machines change their minds between two runs."""
    first = probe(world, tmp_path)
    if first.Bps is None:
        pytest.skip(first.note)
    ratios = []
    for number in range(PAIRS):
        if number % 2:
            fio = fio_Bps(tmp_path, first.block_bytes)
        measured = probe(world, tmp_path)
        if not number % 2:
            fio = fio_Bps(tmp_path, first.block_bytes)
        assert measured.Bps is not None
        ratios.append(measured.Bps / fio)
    assert os.listdir(tmp_path) == []
    assert 0.85 < statistics.median(ratios) < 1.15, ratios
