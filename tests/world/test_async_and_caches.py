"""What DCP does not tell by itself: shared groups, unread futures, plans cached in the class (CASES 16, 18, 19)."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from pytest_ckpt.world.spawned import SpawnedWorld
from tests.world import ranks
from tests.world.conftest import Failed, ready


def test_async_save_on_the_group_of_training_ends_at_the_deadline_with_that_reason(
    world: SpawnedWorld, tmp_path: Path
) -> None:
    world.run(ranks.pid)
    began = time.monotonic()
    location = str(tmp_path / "save")
    failed = Failed(
        world,
        lambda: world.run(ranks.train_while_saving, timeout_s=6, location=location, shared=True, steps=100_000),
    )
    assert failed.at_s - began < 20
    assert "hint: an async save was started on the process group that training uses" in failed.text
    assert "give the save a dedicated gloo group" in failed.text


def test_async_save_on_a_group_of_its_own_lets_training_go_on(world: SpawnedWorld, tmp_path: Path) -> None:
    replies = world.run(
        ranks.train_while_saving, timeout_s=60, location=str(tmp_path / "save"), shared=False, steps=2000
    )
    assert replies == [2000, 2000]
    assert (tmp_path / "save" / ".metadata").exists()


def test_failed_async_save_whose_future_nobody_read_fails_with_its_reason(world: SpawnedWorld, tmp_path: Path) -> None:
    location = str(tmp_path / "save")
    failed = Failed(world, lambda: world.run(ranks.start_a_save_and_never_look, location=location, writer="full"))
    assert failed.culprits == [1]
    assert "No space left on device" in failed.by_rank[1].cause
    assert failed.by_rank[1].phase.endswith("in the background: save > write_data")
    assert {f.rank for f in failed.failure.failed} == {0, 1}


def test_function_that_returns_while_its_save_still_runs_fails(world: SpawnedWorld, tmp_path: Path) -> None:
    location = str(tmp_path / "save")
    failed = Failed(world, lambda: world.run(ranks.start_a_save_and_never_look, location=location, writer="slow"))
    assert failed.culprits == [0, 1]
    assert "UnreadSave: returned while its async save was still running; call result()" in failed.text
    assert "hint" not in failed.text


@pytest.mark.parametrize("second", ["huggingface", "tagging"])
def test_second_writer_type_in_one_world_crashes_on_the_first_ones_cached_plan(
    world: SpawnedWorld, tmp_path: Path, second: str
) -> None:
    """The planted defect: without `prepare` between them DCP's class-level plans are those of the first writer."""
    world.run(ranks.save_with_cached_plans, location=str(tmp_path / "one"), writer="filesystem")
    two = str(tmp_path / "two")
    failed = Failed(world, lambda: world.run(ranks.save_with_cached_plans, location=two, writer=second))
    assert re.search(r"TypeError: .* is not (iterable|a container)", failed.text)


def test_prepare_between_two_writer_types_forgets_cached_plans(world: SpawnedWorld, tmp_path: Path) -> None:
    for number, writer in enumerate(["filesystem", "tagging", "filesystem"]):
        ready(world, ranks.small_state)
        world.run(ranks.save_with_cached_plans, location=str(tmp_path / str(number)), writer=writer)
    assert (tmp_path / "2" / ".metadata").exists()
