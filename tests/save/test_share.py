"""The planner of a share, against DCP's own on the ranks of the whole job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from pytest_ckpt.accept.verify import verify
from pytest_ckpt.errors import SettingError
from pytest_ckpt.model.geometry import GEOMETRIES, Geometry, Llama3, Qwen3MoE
from pytest_ckpt.model.recipe import RECIPES
from pytest_ckpt.model.share import PARTIAL, Share, rank_bytes
from pytest_ckpt.model.share_state import make_share
from pytest_ckpt.save.dcp import DcpEngine
from pytest_ckpt.save.loading import require_loadable
from pytest_ckpt.save.share import SharePlanner, mark_partial
from pytest_ckpt.save.simulated_ranks import SimulatedRanks
from pytest_ckpt.save.torch_private import clear_plan_caches
from pytest_ckpt.save.trace import planned_bytes

CPU = torch.device("cpu")
# No dimension divides by 7, tied weights, and experts fewer than ranks: some chunks are empty.
TIED = Llama3("uneven-tied", 2, 30, 101, True, 3, 1, 10, 70)
MOE = Qwen3MoE("uneven-moe", 2, 21, 37, False, 2, 1, 3, 6, 3, 1)
RECIPE = RECIPES["fp32-adamw"]


@pytest.fixture(autouse=True)
def _fresh_caches() -> Iterator[None]:
    clear_plan_caches()
    yield
    clear_plan_caches()


def planner(geometry: Geometry, share: Share, rank: int, **options: Any) -> SharePlanner:
    state = make_share(geometry, RECIPE, share, rank, CPU)
    made = SharePlanner(state.wholes, share, rank, **options)
    made.set_up_planner(state.state_dict, StorageMeta(), is_coordinator=rank == 0)
    return made


def tensors(plan: SavePlan) -> list[Any]:
    """What is stored of each tensor: not whether its gradient was wanted, which nobody stores."""
    return [
        (item.index.fqn, tuple(item.index.offset or ()), item.type, data.chunk, data.size, data.properties.dtype)
        for item in plan.items
        if (data := item.tensor_data) is not None
    ]


def chunk_counts(metadata: Metadata) -> set[int]:
    stored = metadata.state_dict_metadata.values()
    return {len(one.chunks) for one in stored if isinstance(one, TensorStorageMetadata) and len(one.size)}


@pytest.mark.parametrize("geometry", [TIED, MOE, GEOMETRIES["llama3-tiny"]], ids=lambda geometry: geometry.name)
def test_each_rank_plans_what_the_same_rank_of_the_whole_job_plans(geometry: Geometry) -> None:
    job = SimulatedRanks(geometry, RECIPE, 7)
    for rank in (0, 1, 5):
        own = planner(geometry, Share(6, 7), rank).create_local_plan()
        assert tensors(own) == tensors(job.planned(rank))
        assert [item.index.fqn for item in own.items] == [item.index.fqn for item in job.planned(rank).items]


def test_dcps_own_planner_would_refuse_the_same_plans() -> None:
    plans = [planner(TIED, Share(2, 7), rank).create_local_plan() for rank in (0, 1)]
    with pytest.raises(ValueError, match=r"invalid fill tensor-volume|Failed to validate"):
        DefaultSavePlanner().create_global_plan(plans)


@pytest.mark.parametrize("geometry", [TIED, MOE], ids=lambda geometry: geometry.name)
def test_metadata_tells_of_the_chunks_of_these_ranks_and_of_no_others(geometry: Geometry) -> None:
    planners = [planner(geometry, Share(2, 7), rank) for rank in (0, 1)]
    plans, metadata = planners[0].create_global_plan([one.create_local_plan() for one in planners])
    assert len(plans) == 2
    assert [planned_bytes(plan) for plan in plans] == [rank_bytes(geometry, RECIPE, 7, rank) for rank in (0, 1)]
    listed = {
        (key, tuple(chunk.offsets), tuple(chunk.sizes))
        for key, one in metadata.state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
        for chunk in one.chunks
    }
    planned = {
        (item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        for plan in plans
        for item in plan.items
        if (data := item.tensor_data) is not None
    }
    assert listed == planned


def test_chunks_that_overlap_are_still_found() -> None:
    first, early = planner(TIED, Share(2, 7), 0), planner(TIED, Share(2, 8), 1)
    with pytest.raises(ValueError, match=r"overlapping chunks|Failed to validate"):
        first.create_global_plan([first.create_local_plan(), early.create_local_plan()])


def test_plans_are_kept_from_save_to_save_as_dcp_keeps_them() -> None:
    for turn in range(3):
        first = planner(TIED, Share(2, 7), 0, enable_plan_caching=True)
        local = first.create_local_plan()
        # The cache is the class's, and in this one process it is that of rank 0.
        other = SavePlan([], usable=False) if turn else planner(TIED, Share(2, 7), 1).create_local_plan()
        plans, metadata = first.create_global_plan([local, other])
        assert [plan.usable for plan in (local, *plans)] == [turn == 0] * 3
        assert chunk_counts(metadata) == {2}
        assert planned_bytes(first.finish_plan(plans[0])) == rank_bytes(TIED, RECIPE, 7, 0)


def test_part_of_a_checkpoint_says_so_and_is_refused_by_loads(tmp_path: Path) -> None:
    mark_partial(str(tmp_path / "missing"), Share(2, 64))
    assert list(tmp_path.iterdir()) == [], "where a writer left nothing, nothing is made to look like something"
    mark_partial(str(tmp_path), Share(2, 64))
    assert "2 of 64 ranks" in (tmp_path / PARTIAL).read_text()
    with pytest.raises(SettingError, match=r"holds a part of a checkpoint \(see PARTIAL\.txt there\)"):
        require_loadable(DcpEngine("sync", FileSystemWriter, None), str(tmp_path))  # type: ignore[arg-type]
    found = verify(str(tmp_path))
    assert (found.outcome, found.text) == (
        "partial",
        "not verified: a part of a checkpoint, as --ckpt-share writes it (see PARTIAL.txt): "
        "most of each tensor is missing",
    )
    (tmp_path / PARTIAL).write_text("what else I have to do\n")
    assert verify(str(tmp_path)).outcome == "no-checkpoint"
