"""What the tests of planning run in real ranks, and planners that are not as they should be."""

from __future__ import annotations

import pickle
from itertools import product
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save

from pytest_ckpt.model.geometry import GPT2, Geometry, Llama3
from pytest_ckpt.model.recipe import RECIPES
from pytest_ckpt.model.state import make_state
from pytest_ckpt.world.context import Rank

GEOMETRIES: dict[str, Geometry] = {
    # Parameters of 21, 12, 6, 5 and 2 rows: shards that are uneven, and from 4 ranks on empty.
    "odd": Llama3("odd", 1, 12, 21, False, 3, 1, 2, 5),
    # Tied weights, and parameters of one dimension.
    "tied": GPT2("tied", 2, 12, vocab=17, tie=True, heads=2, context=7),
    "thin": Llama3("thin", 1, 256, 512, False, 4, 4, 64, 256),
}


def planned_by_dcp(rank: Rank, *, model: str, recipe: str, location: str) -> bytes:
    """Save a real FSDP state with `dcp.save` and return this rank's local plan of it, as DCP pickles it."""
    state = make_state(GEOMETRIES[model], RECIPES[recipe], rank.mesh, rank.device)
    planner = Noting()
    save(
        state.state_dict,
        storage_writer=FileSystemWriter(location, sync_files=False),
        planner=planner,
        process_group=rank.save_group,
    )
    return planner.noted


class Noting(DefaultSavePlanner):
    """DCP's planner, which notes its local plan."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.noted = pickle.dumps(plan)
        return plan


class Uneven(DefaultSavePlanner):
    """Leaves an item out on every rank but the first."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return plan if self.is_coordinator else SavePlan(plan.items[1:], None, plan.planner_data)


class Quadratic(DefaultSavePlanner):
    """Compares all chunks of a tensor with all others, as DCP itself once did (pytorch 163548)."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        for value in metadata.state_dict_metadata.values():
            if isinstance(value, TensorStorageMetadata):
                assert not any(
                    one is not other and _overlap(one, other) for one, other in product(value.chunks, repeat=2)
                )
        return plans, metadata


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    return all(
        a < b + lengths_b and b < a + lengths_a
        for a, lengths_a, b, lengths_b in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


def kinds(plan: SavePlan) -> dict[Any, int]:
    """Return how many items of each type a plan has."""
    return {kind: sum(item.type is kind for item in plan.items) for kind in {item.type for item in plan.items}}
