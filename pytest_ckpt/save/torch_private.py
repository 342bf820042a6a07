"""The private names of torch that we cannot do without; tests/save/test_torch_private.py says which torch broke one."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def dcp_logger() -> logging.Logger:
    """Return the logger object to which DCP writes its start and end events.

    Its registered name is not the constant that names it, so the object is taken where DCP keeps it.
    """
    from torch.distributed.checkpoint import logger

    return logger._dcp_logger


def clear_plan_caches() -> None:
    """Forget the plans that DCP caches in the planner class: another scenario's would be used for ours."""
    from torch.distributed.checkpoint.planner import SavePlanner

    for name in PLAN_CACHES:
        cache = getattr(SavePlanner, name, None)
        if isinstance(cache, dict):
            cache.clear()


PLAN_CACHES = (
    "_cached_save_plan",
    "_cached_final_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
)


def end_checkpoint_process(timeout_s: float = 10.0) -> None:
    """End DCP's background process, which it keeps for the life of this one, so that the next save starts another."""
    from torch.distributed.checkpoint import _async_process_executor as executor

    process = executor._CHECKPOINT_PROCESS
    executor._CHECKPOINT_PROCESS = None
    if process is None:
        return
    child = process._save_process
    with suppress(OSError, ValueError):
        process._send(executor._CheckpointSaveProcessControlOpts.TERMINATE)
    child.join(timeout_s)
    if child.is_alive():
        child.kill()
        child.join(timeout_s)
    process._process_pipe.close()


def wrapped_failures(error: BaseException) -> dict[int, tuple[BaseException, Any]]:
    """Return `{rank: (exception, stack summary)}` of a DCP `CheckpointException`, or nothing for another error."""
    from torch.distributed.checkpoint.api import CheckpointException

    if not isinstance(error, CheckpointException):
        return {}
    return dict(error.failures)


def offsets_of_shard(tensor: DTensor) -> tuple[int, ...]:
    """Return where in the whole tensor this rank's part begins, one offset for each dimension, as DCP computes them."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


def mesh_on_paper(size: int, rank: int) -> DeviceMesh:
    """Return the mesh of a full shard over `size` ranks as `rank` sees it, without a process group."""
    import torch
    from torch.distributed import device_mesh

    given: dict[str, Any] = {"mesh_dim_names": ("shard",), "_init_backend": False}
    try:
        return device_mesh.DeviceMesh("cpu", torch.arange(size), _rank=rank, **given)
    except TypeError:  # a torch before 2.10, which looks up its rank in the process group
        with _replaced(device_mesh, "get_rank", lambda: rank):
            return device_mesh.DeviceMesh("cpu", torch.arange(size), **given)


@contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def validation_timed(note: Callable[[float], None]) -> Iterator[None]:
    """Tell `note` the CPU seconds that DCP's check of a global plan takes; nothing where this torch has none."""
    from torch.distributed.checkpoint import default_planner

    validate = getattr(default_planner, _VALIDATE, None)
    if validate is None:
        yield
        return

    def timed(*arguments: Any) -> Any:
        began = time.process_time()
        try:
            return validate(*arguments)
        finally:
            note(time.process_time() - began)

    with _replaced(default_planner, _VALIDATE, timed):
        yield


_VALIDATE = "_validate_global_plan"
"""The planner looks it up in its module when it plans."""


def write_results(plan: SavePlan, rank: int) -> list[WriteResult]:
    """Return what a FileSystemWriter would report of `rank`'s plan: one file, in it each item at its offset.

    Lengths are those of the tensors' bytes; torch.save's own few hundred bytes of each item are not known before it
    is written.
    """
    from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    results, offset, path = [], 0, f"__{rank}_0{DEFAULT_SUFFIX}"
    for item in plan.items:
        data = item.tensor_data
        length = math.prod(data.chunk.sizes) * data.properties.dtype.itemsize if data else 0
        info = _StorageInfo(path, offset, length)
        results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=info))
        offset += length
    return results
