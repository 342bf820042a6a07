"""The engine `torch-checkpointing`: Meta's library of that name, where it is installed.

What it does otherwise than DCP, so that a table of both is read rightly (version 0.1.1, read and tried):

- Each rank writes all that it holds, replicas too, with one `torch.save` of its whole state: no plan, no deduplication.
- It never syncs; here its hook before the last barrier syncs each rank's files, as DCP's writer does.
- Files are written beside the place and renamed there when all ranks are done.
- It writes with O_DIRECT unless told otherwise, and its writes are not aligned: ext4 and XFS refuse them (EINVAL).
- Ranks wait for each other on the store of the default process group, not on a group: no collective of training can
  meet it. Its own collectives, which put the metadata together, are on the group that the engine is given.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch_checkpointing import (
    AsyncCheckpointSaverConfig,
    CheckpointBase,
    CheckpointItem,
    CheckpointLoader,
    CheckpointReader,
    CheckpointStagerConfig,
    CheckpointWriterConfig,
    DefaultMetadataManager,
    RankInfo,
    SyncCheckpointSaverConfig,
    make_async_checkpoint_saver,
    make_sync_checkpoint_saver,
)
from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from pytest_ckpt.errors import SettingError, unknown_name
from pytest_ckpt.save.engine import Pending

if TYPE_CHECKING:
    from pytest_ckpt.save.engines import EngineSetup

_STAGING: dict[str, dict[str, bool]] = {
    "async": {},  # its own defaults: a thread stages into shared memory, pinned where there is CUDA
    "async-process": {
        "use_pinned_memory": False,
        "use_shared_memory": True,
        "use_async_staging": False,
        "use_non_blocking_copy": False,
    },
    "async-pinned": {
        "use_pinned_memory": True,
        "use_shared_memory": True,
        "use_async_staging": True,
        "use_non_blocking_copy": True,
    },
}
MODES = ("sync", *_STAGING)
"""Whatever is not `sync` is written by its background process, so `async-staged`, a thread, is none of its modes."""
OPTIONS = {"sync_files": True, "use_direct_io": False}

_ITEM = "state"
"""All is one item, hence one file a rank as DCP writes: names of items may hold no dot, and keys of a state do."""
_FOLDER = "checkpoint"
"""Below the location, so that what is not yet renamed lies there as well and is removed with it."""
_METADATA = "metadata.pkl"
_START_S = 300
_NEVER_S = 86_400
"""Whoever runs the ranks has a deadline, which comes first and can say what they were doing."""
_PR_SET_PDEATHSIG = 1


class TorchCheckpointingEngine:
    """Saves with `torch_checkpointing`, synced unless `sync_files` is off; see `Engine` and this module's docstring.

    Modes: `sync`; `async`, its own defaults; `async-process` and `async-pinned`, the same with DCP's settings of these
    names. Options: `sync_files`, `use_direct_io`. What it saved loads on as many ranks or others; on others
    only tensors are loaded, and what else there is stays as it was.
    """

    def __init__(self, setup: EngineSetup) -> None:
        if setup.mode not in MODES:
            raise SettingError(f"engine torch-checkpointing has no mode {setup.mode!r}; it has {', '.join(MODES)}")
        options = _checked(setup.options)
        rank, size = dist.get_rank(), dist.get_world_size()
        self._group = setup.group
        self._size = size
        self._rank_info = RankInfo(global_rank=rank, global_world_size=size, role_rank=rank, role_world_size=size)
        self._storage = LocalFileSystemStorageConfig(use_direct_io=options["use_direct_io"])
        self._metadata: Any = _GroupMetadata(
            self._rank_info,
            process_group=setup.group,
            # Its sync saver writes no metadata with what is cached, and a later rank count could not load it.
            should_cache_metadata=setup.mode != "sync",
        )
        self._location: Path | None = None
        self._saver: Any = self._make_saver(setup.mode, options["sync_files"])

    def prepare(self, location: str) -> None:
        """See `Engine.prepare`."""
        if "://" in location:
            raise SettingError(f"engine torch-checkpointing saves to paths alone, and {location} is a URL")
        self._location = Path(location, _FOLDER)

    def start(self, state_dict: dict[str, Any]) -> Pending:
        """See `Engine.start`."""
        saved = self._saver.save(str(self._location), _Checkpoint(_asked(state_dict)))
        if saved is None:
            self._until_renamed()
            return Pending(None, None)
        staged, written = saved
        return Pending(staged, _Renamed(self, written))

    def stored_bytes(self) -> int | None:
        """Return the bytes of its files, since its metadata tells none; None where not all ranks' are seen here."""
        if self._location is None or not self._location.is_dir():
            return None
        sizes = {path.name: path.stat().st_size for path in self._location.iterdir()}
        own = {f"{_ITEM}_{rank}.pt" for rank in range(self._size)}
        return sum(sizes.values()) if own <= sizes.keys() else None

    def load(self, state_dict: dict[str, Any], location: str) -> None:
        """See `Engine.load`."""
        checkpoint = _Checkpoint(_asked(state_dict))
        reader = CheckpointReader(rank_info=self._rank_info, storage_config=self._storage)
        CheckpointLoader(reader, self._metadata).load(str(Path(location, _FOLDER)), checkpoint, strict=True)
        for key, value in state_dict.items():
            loaded = checkpoint.state[key]
            if isinstance(value, Stateful):
                value.load_state_dict(loaded)
            else:
                state_dict[key] = loaded

    def close(self) -> None:
        """See `Engine.close`."""
        if self._saver is not None:
            self._saver.close()
            self._metadata.close()
            self._saver = None
            gc.collect()  # its futures and it refer to each other, and hold what was staged

    def _make_saver(self, mode: str, sync_files: bool) -> Any:
        given: dict[str, Any] = {
            "rank_info": self._rank_info,
            "storage_config": self._storage,
            "checkpoint_metadata_manager": self._metadata,
            "pre_finalize_callback": partial(_sync_files, self._rank_info.global_rank) if sync_files else None,
        }
        config: dict[str, Any] = {
            "writer_config": CheckpointWriterConfig(checkpoint_write_barrier_timeout_sec=_NEVER_S),
            "wait_timeout_secs": _NEVER_S,
        }
        if mode == "sync":
            return make_sync_checkpoint_saver(SyncCheckpointSaverConfig(**config), **given)
        config["staging_config"] = CheckpointStagerConfig(**_STAGING[mode])
        config["process_config"] = CheckpointProcessConfig(subprocess_init_timeout_secs=_START_S)
        return make_async_checkpoint_saver(
            AsyncCheckpointSaverConfig(**config),
            subprocess_init_fn=_begin_process,
            subprocess_init_args=(os.getpid(),),
            **given,
        )

    def _until_renamed(self) -> None:
        # After its own barrier rank 0 renames, which tells nobody: until then nothing is where it belongs.
        dist.barrier(group=self._group)


class _Renamed:
    """The end of a save on all ranks, which the library's own future is not."""

    def __init__(self, engine: TorchCheckpointingEngine, written: Any) -> None:
        self._engine, self._written = engine, written
        self._renamed = False

    def result(self) -> None:
        self._written.result()
        if not self._renamed:
            self._engine._until_renamed()
            self._renamed = True


class _Checkpoint(CheckpointBase):
    """A state as the one item that the library saves, or loads into."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def get_items(self) -> dict[str, Any]:
        """See `CheckpointBase`."""
        return {_ITEM: CheckpointItem(value=self.state, resharder=DefaultResharder())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `CheckpointBase`."""
        self.state = state_dict[_ITEM]


class _GroupMetadata(DefaultMetadataManager):
    """The library's own, whose way of gathering needs CUDA whatever the group is."""

    def _all_gather_pickled_data(self, data: Any, process_group: Any = None) -> dict[int, Any]:
        gathered: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(gathered, data, group=process_group)
        return dict(enumerate(gathered))


def _checked(given: Mapping[str, Any]) -> dict[str, bool]:
    for name, value in given.items():
        if name not in OPTIONS:
            raise unknown_name("option of engine torch-checkpointing", name, OPTIONS, "--ckpt-writer-opt")
        if not isinstance(value, bool):
            raise SettingError(f"{name}={value} (from --ckpt-writer-opt) is neither on nor off; write one of them")
    return {**OPTIONS, **given}


def _asked(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()}


# In the background process, unless the mode is sync


def _begin_process(parent: int) -> None:
    # The thread that starts this process lives until the saver is closed, so the signal comes when the rank ends, and
    # not before. torch asks for SIGINT there, which ranks ignore and their children with them.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _sync_files(rank: int, written: Any) -> None:
    for name in [f"{_ITEM}_{rank}.pt", *([_METADATA] if rank == 0 else [])]:
        path = Path(written.path, name)
        if path.exists():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
