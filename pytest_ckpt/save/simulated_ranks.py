"""N ranks on paper: the local plans that DCP would make on each rank of a full shard, without their tensors.

One real plan is the pattern: DCP's own planner makes it of tensors on the meta device, sharded over a mesh that has a
shape and no processes. A rank's plan differs from another's in offsets and sizes of its shards alone, which FSDP cuts
along the first dimension in equal chunks, rounded up: the last ranks have less, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Shard

from pytest_ckpt.errors import CkptError
from pytest_ckpt.model.geometry import Geometry
from pytest_ckpt.model.recipe import Recipe
from pytest_ckpt.model.share import chunk
from pytest_ckpt.model.state import state_on_paper
from pytest_ckpt.save.torch_private import clear_plan_caches, mesh_on_paper

MakePlanner = Callable[[], SavePlanner]


class PlansDiffer(CkptError):
    """A plan on paper is not what the planner makes on that rank."""


class SimulatedRanks:
    """The ranks of one full shard of `geometry`, kept as `recipe` says, over `size` ranks.

    `make_planner` makes the planner of a save, DCP's default planner where it is left out.
    """

    def __init__(
        self, geometry: Geometry, recipe: Recipe, size: int, make_planner: MakePlanner = DefaultSavePlanner
    ) -> None:
        self.size = size
        self._make_planner = make_planner
        self._whole = state_on_paper(geometry, recipe)
        self._pattern = self.planned(0)

    @property
    def items_per_rank(self) -> int:
        """How many write items a rank's plan has."""
        return len(self._pattern.items)

    def state_dict(self, rank: int) -> dict[str, Any]:
        """Return what `rank` would hand to `dcp.save`: names, shards and types, without memory."""
        mesh = mesh_on_paper(self.size, rank)
        sharded: dict[str, Any] = _sharded(self._whole, mesh, self.size, rank)
        return sharded

    def planned(self, rank: int) -> SavePlan:
        """Return the plan that the planner itself makes of `rank`'s state dict."""
        planner = self._make_planner()
        planner.set_up_planner(self.state_dict(rank), StorageMeta(), is_coordinator=rank == 0)
        plan = planner.create_local_plan()
        clear_plan_caches()  # torch 2.9 caches a plan where it is made, and would not send its equal
        return plan

    def plan(self, rank: int) -> SavePlan:
        """Return `rank`'s plan, derived from the pattern.

        It pickles to the same bytes as the planner's: what that one shares between items is shared here, and nothing
        else. What ranks have in common is the same object in all their plans.
        """
        chunks: dict[torch.Size, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        items = []
        for item in self._pattern.items:
            data = item.tensor_data
            if item.type is not WriteItemType.SHARD or data is None:
                items.append(item)
                continue
            known = chunks.get(data.size)
            if known is None:
                start, rows = chunk(data.size[0], self.size, rank)
                known = chunks[data.size] = (start, *(0,) * (len(data.size) - 1)), (rows, *data.size[1:])
            offsets, sizes = known
            items.append(
                WriteItem(
                    index=MetadataIndex(item.index.fqn, offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)),
                        properties=data.properties,
                        size=data.size,
                    ),
                )
            )
        return SavePlan(items, self._pattern.storage_data, self._pattern.planner_data, self._pattern.usable)

    def check(self, ranks: Iterable[int]) -> list[int]:
        """Compare the derived plans of `ranks` with the planner's own, item by item, and return those ranks.

        Raises `PlansDiffer` naming the first item that differs: figures made of wrong plans are worth nothing.
        """
        checked = sorted(set(ranks))
        for rank in checked:
            derived, real = self.plan(rank), self.planned(rank)
            different = next(
                (pair for pair in zip(derived.items, real.items, strict=False) if pair[0] != pair[1]), None
            )
            if different is not None or len(derived.items) != len(real.items) or derived != real:
                what = f"{different[0]} for {different[1]}" if different else "another number of items, or other data"
                raise PlansDiffer(
                    f"the plan on paper of rank {rank} of {self.size} is not what the planner makes there: {what}; "
                    "this planner's plans differ from rank to rank in more than the shards' offsets and sizes"
                )
        return checked


def _sharded(value: Any, mesh: Any, size: int, rank: int) -> Any:
    if isinstance(value, dict):
        return {key: _sharded(inner, mesh, size, rank) for key, inner in value.items()}
    if isinstance(value, list):
        return [_sharded(inner, mesh, size, rank) for inner in value]
    if not isinstance(value, torch.Tensor) or not value.ndim:  # step counters are on every rank
        return value
    _, rows = chunk(value.shape[0], size, rank)
    local = torch.empty((rows, *value.shape[1:]), dtype=value.dtype, device="meta")
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride())
