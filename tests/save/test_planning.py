"""Ranks on paper plan what real ranks plan, and what their planning takes is told as it is."""

from __future__ import annotations

import gc
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import SavePlan

from pytest_ckpt.judge.growth import STEEPEST, fit
from pytest_ckpt.model import geometry
from pytest_ckpt.model.recipe import RECIPES
from pytest_ckpt.model.share import chunk
from pytest_ckpt.save import torch_private
from pytest_ckpt.save.planning import STEPS, PlanningOfSaves, alone_on_a_core
from pytest_ckpt.save.simulated_ranks import PlansDiffer, SimulatedRanks
from pytest_ckpt.world import planning_commands
from pytest_ckpt.world.paper import PaperWorld
from pytest_ckpt.world.spawned import SpawnedWorld

from . import planned

FP32 = RECIPES["fp32-adamw"]
STATES = [("odd", "fp32-adamw"), ("odd", "weights-bf16"), ("tied", "mixed-adamw")]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 4, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.timeout(180)
def test_plans_on_paper_are_those_of_real_ranks_item_by_item(size: int, tmp_path: Path) -> None:
    """Real gloo ranks, `fully_shard` and `dcp.save`; uneven and empty shards, tied weights, with and without AdamW."""
    world = SpawnedWorld(size, timeout_s=120)
    try:
        for model, recipe in STATES:
            location = tmp_path / f"{model}-{recipe}"
            pickled = world.run(planned.planned_by_dcp, model=model, recipe=recipe, location=str(location))
            ranks = SimulatedRanks(planned.GEOMETRIES[model], RECIPES[recipe], size)
            for rank, data in enumerate(pickled):
                real, derived = pickle.loads(data), ranks.plan(rank)
                assert [item.index.fqn for item in derived.items] == [item.index.fqn for item in real.items]
                for one, other in zip(derived.items, real.items, strict=True):
                    assert one == other
                assert derived == real
                assert len(pickle.dumps(derived)) == len(data)
            _require_same_metadata(location, ranks, tmp_path / f"{model}-{recipe}-on-paper")
    finally:
        world.close()


def _require_same_metadata(saved: Path, ranks: SimulatedRanks, folder: Path) -> None:
    folder.mkdir()
    planning = PlanningOfSaves(ranks, DefaultSavePlanner, folder)
    done = planning.save()
    real, derived = FileSystemReader(saved).read_metadata(), FileSystemReader(folder).read_metadata()
    assert derived.state_dict_metadata == real.state_dict_metadata
    assert derived.planner_data == real.planner_data
    assert {index: info.relative_path for index, info in derived.storage_data.items()} == {
        index: info.relative_path for index, info in real.storage_data.items()
    }
    assert done.write_items == len(real.storage_data)
    # Lengths and offsets are a little smaller on paper, and with them their pickled bytes.
    assert done.metadata_bytes == pytest.approx((saved / ".metadata").stat().st_size, rel=0.02)


def test_odd_geometry_has_uneven_and_empty_shards_and_every_kind_of_item() -> None:
    assert [chunk(21, 4, rank) for rank in range(4)] == [(0, 6), (6, 6), (12, 6), (18, 3)]
    assert [chunk(2, 4, rank) for rank in range(4)] == [(0, 1), (1, 1), (2, 0), (2, 0)]
    plan = SimulatedRanks(planned.GEOMETRIES["odd"], FP32, 4).plan(3)
    assert any(item.tensor_data and 0 in item.tensor_data.chunk.sizes for item in plan.items)
    assert len(planned.kinds(plan)) == 3, "shards, step counters and settings of the optimizer"


def test_ranks_of_8b_are_the_planners_own() -> None:
    ranks = SimulatedRanks(geometry.GEOMETRIES["llama3-8b"], FP32, 1024)
    assert len(ranks.plan(0).items) == ranks.items_per_rank == 4 * 291 + 12
    assert ranks.check([0, 1, 512, 1023]) == [0, 1, 512, 1023]


def test_planner_whose_plans_are_otherwise_on_another_rank_is_refused() -> None:
    ranks = SimulatedRanks(planned.GEOMETRIES["odd"], FP32, 4, planned.Uneven)
    with pytest.raises(PlansDiffer, match="rank 1 of 4 is not what the planner makes"):
        ranks.check([0, 1])


def test_each_step_of_a_save_is_timed_and_its_bytes_are_those_that_are_sent(tmp_path: Path) -> None:
    ranks = SimulatedRanks(planned.GEOMETRIES["odd"], FP32, 4)
    planning = PlanningOfSaves(ranks, DefaultSavePlanner, tmp_path)
    done = planning.save()
    assert tuple(done.steps) == STEPS
    assert all(seconds > 0 for seconds in done.steps.values())
    assert done.gathered_bytes == sum(len(pickle.dumps(ranks.planned(rank))) for rank in range(4))
    assert done.metadata_bytes == (tmp_path / ".metadata").stat().st_size
    assert done.write_items < 4 * ranks.items_per_rank, "replicas are written once"


@pytest.mark.timeout(120)
def test_cached_plans_are_not_sent_again_and_not_found_by_the_next_scenario() -> None:
    world = PaperWorld(4, timeout_s=60)
    cached: dict[str, Any] = {"model": "llama3-tiny", "state": "fp32-adamw", "ranks": 4, "planner": None}
    try:
        for _ in range(2):
            (made,) = world.run(planning_commands.prepare_plans, options={"enable_plan_caching": True}, **cached)
            (first,) = world.run(planning_commands.plan_round, alone=False)
            (second,) = world.run(planning_commands.plan_round, alone=True)
            assert first["gathered_bytes"] == pytest.approx(4 * made["plan_bytes"], abs=4)
            assert second["gathered_bytes"] == 4 * len(pickle.dumps(SavePlan([], usable=False)))
            assert second["steps"]["global_plan"] < first["steps"]["global_plan"] / 3
            assert second["metadata_bytes"] == first["metadata_bytes"]
    finally:
        world.close()


def test_replicas_go_to_the_lowest_rank_where_that_is_asked_for(tmp_path: Path) -> None:
    make = partial(DefaultSavePlanner, dedup_save_to_lowest_rank=True)
    ranks = SimulatedRanks(planned.GEOMETRIES["odd"], FP32, 4, make)
    PlanningOfSaves(ranks, make, tmp_path).save()
    stored = FileSystemReader(tmp_path).read_metadata().storage_data
    files = {info.relative_path for index, info in stored.items() if index.fqn.endswith(".step")}
    assert files == {"__0_0.distcp"}


def test_core_and_collector_are_as_before_however_it_ends() -> None:
    before = os.sched_getaffinity(0), gc.isenabled(), gc.get_freeze_count()
    with pytest.raises(KeyError), alone_on_a_core():
        assert len(os.sched_getaffinity(0)) == 1
        assert not gc.isenabled()
        raise KeyError
    assert (os.sched_getaffinity(0), gc.isenabled(), gc.get_freeze_count()) == before


@pytest.mark.timeout(120)
def test_planted_quadratic_check_is_too_steep_and_the_healthy_planner_is_not(tmp_path: Path) -> None:
    """The exponent over four sizes, collector frozen, on a core alone."""
    assert _exponent(DefaultSavePlanner, tmp_path) < STEEPEST
    assert _exponent(planned.Quadratic, tmp_path) > STEEPEST


def _exponent(planner: type[DefaultSavePlanner], folder: Path) -> float:
    torch_private.clear_plan_caches()
    seconds = {}
    for size in (16, 32, 64, 128):
        planning = PlanningOfSaves(SimulatedRanks(planned.GEOMETRIES["thin"], FP32, size, planner), planner, folder)
        with alone_on_a_core():
            seconds[size] = min(planning.save().steps["global_plan"] for _ in range(2))
    return fit("global_plan", seconds).exponent
