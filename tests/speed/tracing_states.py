"""What the ranks of tracing.py import: the states they save, in a module that a rank can name."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pytest_ckpt.world.context import Rank

SMALL, SMALL_BYTES = 1000, 16 * 2**10
LARGE, LARGE_BYTES = 16, 8 * 2**20


def small_tensors(mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """Return what costs the tracer most: many tensors, each a few dozen calls of write, for few bytes."""
    return _own_tensors(SMALL, SMALL_BYTES)


def large_tensors(mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """Return what training states are made of."""
    return _own_tensors(LARGE, LARGE_BYTES)


def collect_garbage(rank: Rank) -> None:
    """Begin each save alike: what the one before it left, and the reply of a traced one, is not this one's to clear."""
    gc.collect()


def _own_tensors(count: int, size_bytes: int) -> dict[str, Any]:
    return {f"{dist.get_rank()}.{number}": torch.rand(size_bytes // 4) for number in range(count)}
