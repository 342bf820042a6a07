"""Writes that fail: torch hides the reason, the failure gives it back, with the rank and the space (CASES 8 and 9)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_ckpt.world.spawned import SpawnedWorld
from tests.world import ranks
from tests.world.conftest import Failed, ready, save

PLENTY = "free space is plenty for a state of"


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(folder)], capture_output=True, timeout=30, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no right to mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], timeout=30, check=True)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_writer_that_finds_no_space_on_one_rank_is_named_with_rank_path_and_bytes(
    world: SpawnedWorld, tmp_path: Path, mode: str
) -> None:
    ready(world, ranks.small_state)
    location = tmp_path / "save"
    failed = Failed(world, lambda: save(world, ranks.full_writer, location, mode))
    assert failed.culprits == [1], "DCP raises it on all ranks"
    assert failed.by_rank[1].phase.endswith("save > write_data")
    assert "OSError: [Errno 28] No space left on device" in failed.by_rank[1].cause
    assert "spoil" in failed.by_rank[1].traceback
    reason, space = failed.by_rank[1].hints
    assert reason == "target full or write failed: ENOSPC No space left on device"
    assert space.startswith(f"{location}: ")
    assert PLENTY in space
    assert failed.by_rank[0].what == "waiting"
    assert not (location / ".metadata").exists()


def test_file_size_limit_on_one_rank_is_told_as_a_failed_write_although_torch_hides_it(
    world: SpawnedWorld, tmp_path: Path
) -> None:
    ready(world, ranks.small_state)
    failed = Failed(world, lambda: save(world, ranks.limited_writer, tmp_path / "save"))
    assert failed.culprits == [1]
    assert "unexpected pos" in failed.by_rank[1].cause, "torch gives the errno now: simplify save/failures.py"
    assert "hint: target full or write failed: " in failed.text
    assert PLENTY in failed.text
    assert "a limit (ulimit -f) or one full storage server is likely" in failed.text


def test_full_target_is_told_with_path_bytes_written_and_bytes_free(world: SpawnedWorld, small_tmpfs: Path) -> None:
    """64 MiB of state into 40 MiB."""
    ready(world, ranks.state_of_64_mib)
    location = small_tmpfs / "save"
    failed = Failed(world, lambda: save(world, ranks.plain_writer, location))
    assert failed.culprits
    for culprit in failed.failure.culprits:
        assert any("target full or write failed" in hint for hint in culprit.hints)
    written = [hint for hint in failed.failure.culprits[0].hints if hint.startswith(f"{location}: ")]
    assert written
    assert "MB written there, " in written[0]
    assert written[0].endswith(" free")
    assert PLENTY not in failed.text
    space = os.statvfs(small_tmpfs)
    assert space.f_bavail * space.f_frsize < 40 * ranks.MiB


def test_writer_factory_that_makes_no_writer_is_named(world: SpawnedWorld, tmp_path: Path) -> None:
    ready(world, ranks.small_state)
    failed = Failed(world, lambda: save(world, ranks.no_writer, tmp_path / "save"))
    assert "writer tests.world.ranks:no_writer returned 'str'" in failed.text
    assert failed.by_rank[0].phase == "save_round > make the writer"
