"""Saving a share of a bigger job: a planner that knows where each rank's chunks lie in tensors that nobody has whole.

The state holds plain tensors, which every way of staging copies as they are; a tensor subclass that knew its place
would not survive DCP's own `BlockingAsyncStager`, which makes plain tensors of all that is no DTensor.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from pytest_ckpt.model.share import PARTIAL, PARTIAL_SIGN, Share, chunk


class SharePlanner(DefaultSavePlanner):
    """DCP's default planner, for the ranks of a share.

    `wholes` has the whole shape of each tensor that is cut, by its key. What the other ranks of the job would hold is
    added to the global plan while DCP checks it, and taken out again: so chunks that overlap or lie out of bounds
    are found as ever, and only what the other ranks would write is not missed.
    """

    def __init__(self, wholes: Mapping[str, tuple[int, ...]], share: Share, rank: int, **options: Any) -> None:
        super().__init__(**options)
        self._wholes, self._share, self._rank = wholes, share, rank

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """See `SavePlanner`."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = {
            key: _Chunk(value, self._wholes[key], self._share, self._rank) if key in self._wholes else value
            for key, value in self.state_dict.items()
        }

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """See `SavePlanner`."""
        others = [item for key in self._wholes if (item := self._of_the_others(key)) is not None]
        usable = any(plan.usable for plan in all_plans)  # else plans are cached, and the others' with them
        added = SavePlan(others, planner_data={}, usable=True) if usable else SavePlan([], usable=False)
        plans, metadata = super().create_global_plan([*all_plans, added])
        return plans[: len(all_plans)], _without(metadata, others)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """See `DefaultSavePlanner`."""
        value = self.state_dict[index.fqn]
        return value.tensor if isinstance(value, _Chunk) else super().lookup_object(index)

    def _of_the_others(self, key: str) -> WriteItem | None:
        """Return as one chunk what the ranks beyond the share would write; None where they would write nothing."""
        value, whole = self.state_dict[key], self._wholes[key]
        start, _ = chunk(whole[0], self._share.of, self._share.count)
        return _item(key, value.tensor, whole, start, whole[0] - start) if start < whole[0] else None


class _Chunk:
    """A tensor with its place, which tells DCP's planner what to write by the protocol that DTensor keeps, too."""

    def __init__(self, tensor: torch.Tensor, whole: tuple[int, ...], share: Share, rank: int) -> None:
        self.tensor, self.whole = tensor, whole
        self.start, self.rows = chunk(whole[0], share.of, rank)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [_item(fqn, self.tensor, self.whole, self.start, self.rows)]


def _item(key: str, tensor: torch.Tensor, whole: tuple[int, ...], start: int, rows: int) -> WriteItem:
    offsets, sizes = torch.Size((start, *(0,) * (len(whole) - 1))), torch.Size((rows, *whole[1:]))
    return WriteItem(
        index=MetadataIndex(key, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=TensorProperties.create_from_tensor(tensor),
            size=torch.Size(whole),
        ),
    )


def _without(metadata: Metadata, items: list[WriteItem]) -> Metadata:
    """Return the metadata without the chunks of `items`, which it was made with."""
    kept = dict(metadata.state_dict_metadata)
    for item in items:
        stored, data = kept[item.index.fqn], item.tensor_data
        assert isinstance(stored, TensorStorageMetadata)
        assert data is not None
        chunks = [one for one in stored.chunks if one != data.chunk]
        kept[item.index.fqn] = dataclasses.replace(stored, chunks=chunks)
    return dataclasses.replace(metadata, state_dict_metadata=kept)


def mark_partial(location: str, share: Share) -> None:
    """Say in the folder `location` that it holds a part of a checkpoint; nothing where there is no such folder."""
    if not os.path.isdir(location):
        return
    with open(os.path.join(location, PARTIAL), "w") as file:
        file.write(
            f"{PARTIAL_SIGN}: it is what {share.count} of {share.of} ranks would write of one, written\n"
            f"by pytest-ckpt to measure that (--ckpt-share={share}). Most of each tensor is missing: load nothing.\n"
        )
