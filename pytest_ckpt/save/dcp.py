"""The engine `dcp`: `torch.distributed.checkpoint`, in all its modes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from pytest_ckpt.save import torch_private
from pytest_ckpt.save.crc32 import without_crc32
from pytest_ckpt.save.engine import Pending
from pytest_ckpt.save.modes import MODES, make_stager
from pytest_ckpt.save.options import Value, owned_by

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlanner
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

    from pytest_ckpt.save.engines import PlannerSetup


class DcpEngine:
    """Saves through `dcp.save` or `dcp.async_save`; see `Engine`."""

    def __init__(
        self,
        mode: str,
        writer: Callable[[str], StorageWriter],
        group: ProcessGroup,
        options: Mapping[str, Value] | None = None,
        planner: PlannerSetup | None = None,
        make_reader: Callable[[str], StorageReader] | None = None,
    ) -> None:
        self.mode = MODES[mode]
        of_options: dict[str, Any] = dict(owned_by("planner", options or {}))
        self.planner_class: type[DefaultSavePlanner] = DefaultSavePlanner if planner is None else planner.made_by
        self.planner_options: dict[str, Any] = of_options if planner is None else {**planner.arguments, **of_options}
        """Arguments of `planner_class`."""
        self._crc32 = bool((options or {}).get("crc32", True))
        self._keeps_writer = bool((options or {}).get("cache_staged_state_dict", False))
        self._make_writer = writer
        self.make_reader = make_reader
        """Of loads; None: DCP takes the one that the path tells."""
        self._group = group
        self.stager = make_stager(self.mode)
        """Of all saves; None where the writer stages."""
        self.writer: StorageWriter | None = None
        """Of the save that was prepared; may be replaced by one that watches it."""
        self.planner: SavePlanner | None = None
        """None: DCP's default."""
        self._kept: StorageWriter | None = None
        self._metadata: Metadata | None = None
        self._location = ""

    def prepare(self, location: str) -> None:
        """See `Engine.prepare`."""
        self._location = location
        if self._keeps_writer and self._kept is not None:
            # What it staged is in the writer, which DCP itself would reset in this way.
            self._kept.reset(location)
            self.writer = self._kept
        else:
            self.writer = self._kept = self._make_writer(location)
            if not self._crc32:
                without_crc32(self.writer, type(self.writer).__name__)
        self.planner = self.planner_class(**self.planner_options) if self.planner_options else None

    def start(self, state_dict: dict[str, Any]) -> Pending:
        """See `Engine.start`."""
        given: dict[str, Any] = {
            "storage_writer": self.writer,
            "planner": self.planner,
            "process_group": self._group,
        }
        if self.mode.name == "sync":
            self._metadata = state_dict_saver.save(state_dict, **given)
            return Pending(None, None)
        kind = AsyncCheckpointerType.PROCESS if self.mode.process else AsyncCheckpointerType.THREAD
        if self.stager is not None:
            given["async_stager"] = self.stager
        response = state_dict_saver.async_save(state_dict, async_checkpointer_type=kind, **given)
        if isinstance(response, AsyncSaveResponse):
            return Pending(response.staging_completion, _Noting(self, response.upload_completion))
        return Pending(None, _Noting(self, response))

    def stored_bytes(self) -> int | None:
        """See `Engine.stored_bytes`."""
        if self._metadata is None:
            return None
        if self._metadata.storage_data is None:  # torch 2.9 returns what it had before the writer's part was added
            try:
                return stored_bytes(self.reader(self._location).read_metadata())
            except Exception:  # of a format that is not known here, which is no failure of the save
                return None
        return stored_bytes(self._metadata)

    def reader(self, location: str) -> StorageReader:
        """Return what reads the checkpoint in the folder `location`."""
        return FileSystemReader(location) if self.make_reader is None else self.make_reader(location)

    def load(self, state_dict: dict[str, Any], location: str) -> None:
        """See `Engine.load`."""
        reader = None if self.make_reader is None else self.make_reader(location)
        state_dict_loader.load(state_dict, checkpoint_id=location, storage_reader=reader, process_group=self._group)

    def close(self) -> None:
        """See `Engine.close`."""
        if self.stager is not None:
            self.stager.close()
            self.stager = None
        self.writer = self._kept = None
        if self.mode.process:
            torch_private.end_checkpoint_process()


class _Noting:
    """A future whose result the engine keeps: the checkpoint's metadata."""

    def __init__(self, engine: DcpEngine, future: Any) -> None:
        self._engine, self._future = engine, future

    def result(self) -> Any:
        self._engine._metadata = self._future.result()
        return self._engine._metadata


def stored_bytes(metadata: Metadata) -> int | None:
    """Return the bytes of all ranges that a checkpoint's metadata refers to; None where the writer lists none."""
    lengths = [getattr(info, "length", None) for info in (metadata.storage_data or {}).values()]
    if not lengths or None in lengths:
        return None
    return sum(int(length) for length in lengths if length is not None)
