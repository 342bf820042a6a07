"""Watching DCP's background process (the `process` modes): what it notes of a save comes back by a file.

Writer and planner travel to it by pickle. Their pickles name functions of this module, so that unpickling them there
starts the noting: nothing of DCP's process is changed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_ckpt.measure.memory import PeakMemory
from pytest_ckpt.measure.resources import ProcessUsage
from pytest_ckpt.measure.spans import RankTrace
from pytest_ckpt.save import torch_private
from pytest_ckpt.save.trace import SaveTrace

if TYPE_CHECKING:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlanner
    from torch.distributed.checkpoint.storage import StorageWriter

_PARENT_POLL_S = 0.5
_FILE = "background-save"


class BackgroundSave(msgspec.Struct, frozen=True, kw_only=True):
    """What the background process noted of one save."""

    trace: RankTrace
    streams_seen: bool
    cpu_s: float
    write_bytes: int | None
    peak_rss_bytes: int | None


class BackgroundTrace:
    """In the rank: what to hand to DCP, and what came back. `folder` is the rank's own; one save at a time."""

    def __init__(self, folder: str) -> None:
        self._file = Path(folder) / f"{_FILE}-{os.getpid()}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (str(self._file), os.getpid())

    def writer(self, writer: StorageWriter) -> StorageWriter:
        """Return what becomes `writer`, watched, in the background process."""
        return _Travelling(_unpack_writer, writer, self)  # type: ignore[return-value]

    def planner(self, made_by: type[DefaultSavePlanner], options: dict[str, Any]) -> SavePlanner:
        """Return what becomes a planner of class `made_by` with `options`, watched, in the background process."""
        return _Travelling(_unpack_planner, self, made_by, options)  # type: ignore[return-value]

    def collect(self) -> BackgroundSave | None:
        """Return what was noted of the save that has just ended, and forget it; None where nothing was."""
        try:
            data = self._file.read_bytes()
        except FileNotFoundError:
            return None
        self._file.unlink()
        return msgspec.msgpack.decode(data, type=BackgroundSave)


class _Travelling:
    """Pickles as a call of `function`, and is nothing by itself."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


class _Noting(logging.Handler):
    """In the background process: notes one save, and leaves the file before DCP sends its answer."""

    def __init__(self, file: str) -> None:
        super().__init__(logging.DEBUG)
        self.file = Path(file)
        self.trace = SaveTrace()
        self.streams_seen = False
        self._running = self.trace.running()
        self._usage, self._peak = ProcessUsage(), PeakMemory()
        self._usage.start()
        self._peak.start()
        self._began = time.monotonic()
        self._running.__enter__()
        torch_private.dcp_logger().addHandler(self)

    def handle(self, record: logging.LogRecord) -> bool:
        event = record.msg
        if isinstance(event, dict) and event.get("func_name") == "save" and event.get("event") in ("end", "exception"):
            self._leave()
        return True

    def _leave(self) -> None:
        self._running.__exit__(None, None, None)
        torch_private.dcp_logger().removeHandler(self)
        now = time.monotonic()
        cpu_s, write_bytes = self._usage.stop()
        noted = BackgroundSave(
            trace=self.trace.result(self._began, now, now),
            streams_seen=self.streams_seen,
            cpu_s=cpu_s,
            write_bytes=write_bytes,
            peak_rss_bytes=self._peak.stop(),
        )
        draft = self.file.with_suffix(".draft")
        draft.write_bytes(msgspec.msgpack.encode(noted))
        draft.replace(self.file)


def _arrive(file: str, parent: int) -> _Noting:
    _end_with(parent)
    return _Noting(file)


def _unpack_writer(writer: StorageWriter, noting: _Noting) -> StorageWriter:
    noting.streams_seen = noting.trace.watch_writer(writer)
    return writer


def _unpack_planner(noting: _Noting, made_by: type[DefaultSavePlanner], options: dict[str, Any]) -> SavePlanner:
    return noting.trace.planner(made_by, **options)


def _end_with(parent: int) -> None:
    """End this process soon after its parent has: the kernel's death signal would come when a mere thread ends."""
    if any(thread.name == _FILE for thread in threading.enumerate()):
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name=_FILE, daemon=True).start()
