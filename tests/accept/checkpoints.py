"""Checkpoints for the tests of verify, saved by DCP in ranks: healthy ones of every kind, and some that went wrong."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from pytest_ckpt.world.context import Rank


def save_all_kinds(rank: Rank, *, folder: str) -> None:
    """Save into folders of `folder`, each named after what is special about it."""
    root = Path(folder)
    state, tensors = of_all_kinds(rank), only_tensors(rank)
    _save(state, FileSystemWriter(root / "plain"), rank)
    _save(state, FileSystemWriter(root / "threads", thread_count=3), rank)
    _save(state, FileSystemWriter(root / "file-per-tensor", single_file_per_rank=False), rank)
    torch.serialization.set_crc32_options(False)
    try:
        _save(state, FileSystemWriter(root / "no-crc32"), rank)
    finally:
        torch.serialization.set_crc32_options(True)
    _save(tensors, FileSystemWriter(root / "safetensors", serialization_format=SerializationFormat.SAFETENSORS), rank)
    _save(tensors, HuggingFaceStorageWriter(str(root / "hugging-face"), save_distributed=True), rank)
    _save(
        tensors,
        HuggingFaceStorageWriter(str(root / "consolidated"), save_distributed=True, enable_consolidation=True),
        rank,
    )
    save(state, storage_writer=FileSystemWriter(root / "without-collectives"), use_collectives=False)
    # More files than the next save into the same folder needs.
    _save(state, FileSystemWriter(root / "fewer-threads", thread_count=3), rank)
    _save(state, FileSystemWriter(root / "fewer-threads", thread_count=1), rank)


def save_over(rank: Rank, *, location: str, fails: bool) -> bool:
    """Save other values where a checkpoint is; with `fails` rank 1 raises before it writes. Return whether it ended."""
    state = {"weight": sharded(torch.randn(64, 8), rank)}
    _save(state, FileSystemWriter(location), rank)
    state["weight"].to_local().add_(1)
    try:
        _save(state, _FailsOnRankOne(location) if fails else FileSystemWriter(location), rank)
    except CheckpointException:
        return False
    return True


class _FailsOnRankOne(FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("planted")
        return super().write_data(plan, planner)


def _save(state: dict[str, Any], writer: StorageWriter, rank: Rank) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an existing checkpoint is written over on purpose
        save(state, storage_writer=writer, process_group=rank.save_group)


def sharded(tensor: torch.Tensor, rank: Rank, dimension: int = 0) -> DTensor:
    return distribute_tensor(tensor, rank.mesh, [Shard(dimension)])


def only_tensors(rank: Rank) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "weight": sharded(torch.randn(40, 6, generator=generator), rank),
        "across": sharded(torch.randn(6, 10, generator=generator), rank, 1),
        "bf16": sharded(torch.randn(9, generator=generator).to(torch.bfloat16), rank),
    }


def of_all_kinds(rank: Rank) -> dict[str, Any]:
    """Shapes that do not divide by the ranks, types of every width, replicas, nesting, objects and odd names."""
    return {
        **only_tensors(rank),
        "sizes": {str(size): sharded(torch.arange(size, dtype=torch.float32), rank) for size in (0, 1, 3, 5)},
        "replica": distribute_tensor(torch.arange(7), rank.mesh, [Replicate()]),
        "plain": [torch.tensor(3.5), torch.ones(2, 3, dtype=torch.float8_e4m3fn), torch.tensor([True, False])],
        "complex": torch.ones(3, dtype=torch.complex64),
        "strided": torch.rand(6, 4).T,
        "Gewicht\u00e4": torch.zeros(4, dtype=torch.int8),
        "large": sharded(torch.randn(600_000), rank),
        "step": 7,
        "large object": "x" * 1_100_000,
        "nested": {"list": [1, {"name": "x"}]},
        "object": {"lr": 0.1, "betas": (0.9, 0.95)},
    }
