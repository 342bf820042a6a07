"""Writers and rank functions for the tests of durability, at module level; each writer but two has one thing wrong."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult

from pytest_ckpt.accept.audit import audit
from pytest_ckpt.accept.durable import make_durable
from pytest_ckpt.world.context import Rank

Results = list[list[WriteResult]]


def sync_folder(path: str | os.PathLike[str]) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Careful(FileSystemWriter):
    """Does all of it by itself: data synced by DCP, then metadata, its name, the folder, and the folder's own name."""

    flushes = True
    syncs_folder = True

    def finish(self, metadata: Metadata, results: Results) -> None:
        metadata.storage_data = {one.index: one.storage_data for ranks in results for one in ranks}
        metadata.storage_meta = self.storage_meta()
        folder = Path(self.path)
        draft = folder / ".metadata.draft"
        with draft.open("wb") as file:
            pickle.dump(metadata, file)
            if self.flushes:
                file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / ".metadata")
        if self.syncs_folder:
            sync_folder(folder)
            sync_folder(folder.parent)


class SyncsBeforeFlushing(Careful):
    flushes = False


class ForgetsTheRename(Careful):
    syncs_folder = False


class ForgetsTheData(Careful):
    def __init__(self, path: str) -> None:
        super().__init__(path, sync_files=False)


class MadeDurable(FileSystemWriter):
    """DCP's writer with the advice."""

    def finish(self, metadata: Metadata, results: Results) -> None:
        super().finish(metadata, results)
        make_durable(self.path)


class SyncsTheWholeHost(FileSystemWriter):
    def finish(self, metadata: Metadata, results: Results) -> None:
        super().finish(metadata, results)
        os.sync()


WRITERS: dict[str, Callable[[str], FileSystemWriter]] = {
    "dcp": FileSystemWriter,
    "dcp, made durable": MadeDurable,
    "dcp, made durable where fsync does nothing": MadeDurable,
    "careful": Careful,
    "syncs before flushing": SyncsBeforeFlushing,
    "forgets the rename": ForgetsTheRename,
    "forgets the data": ForgetsTheData,
    "syncs the whole host": SyncsTheWholeHost,
}
DURABLE = {"dcp, made durable", "careful", "syncs the whole host"}


@contextlib.contextmanager
def nothing_is_synced() -> Iterator[None]:
    """As with libeatmydata, or a container that has it preloaded for its speed."""
    real = os.fsync
    os.fsync = lambda fd: None
    try:
        yield
    finally:
        os.fsync = real


def state_of(rank: Rank, fill: Callable[..., torch.Tensor]) -> dict[str, Any]:
    return {"shared": fill(300), f"own{rank.rank}": fill(500, 40)}


def save_audited(rank: Rank, location: str, writer: str, mode: str = "sync") -> Any:
    torch.manual_seed(rank.rank)
    state = state_of(rank, torch.rand)
    state["shared"].fill_(7.0)  # alike on all ranks, as DCP takes it for granted
    rank.memory["saved"] = state
    broken = nothing_is_synced() if writer.endswith("does nothing") else contextlib.nullcontext()
    with broken, audit(location) as noted:
        if mode == "sync":
            save(state, storage_writer=WRITERS[writer](location), process_group=rank.save_group)
        else:
            future = async_save(state, storage_writer=WRITERS[writer](location), process_group=rank.save_group)
            future.result()  # type: ignore[union-attr]
    return msgspec.to_builtins(noted.result())


def load_equal(rank: Rank, location: str) -> bool:
    """Whether what lies in `location` loads, bit for bit."""
    state = state_of(rank, torch.zeros)
    try:
        load(state, checkpoint_id=location, process_group=rank.save_group)
    except CheckpointException:
        return False
    return all(torch.equal(state[name], saved) for name, saved in rank.memory["saved"].items())
