"""Tracing one save on its rank: DCP's events, the planner's `resolve_data`, the streams that the writer opens."""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase

from pytest_ckpt.measure.spans import Event, Item, RankTrace, Sync
from pytest_ckpt.save import torch_private

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem
    from torch.distributed.checkpoint.storage import StorageWriter

_now = time.monotonic
_PER_KEY = "_stateful_to_state_dict."
"""DCP's name for one entry of the state ends in the entry's key, which may be the name of anything else."""


class SaveTrace:
    """Notes what happens between `start` and `stop`; several writer threads may note at once.

    DCP's log records carry wall-clock time, so CLOCK_MONOTONIC is read where a record arrives. Lists are only ever
    appended to, which needs no lock.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._items: list[Item] = []
        self._syncs: list[Sync] = []
        self._global_syncs = 0
        self._calls = 0
        self._planned_bytes: int | None = None
        self._resolved = threading.local()
        self._handler = _EventHandler(self._events)

    def planner(self, made_by: type[DefaultSavePlanner] = DefaultSavePlanner, **options: Any) -> DefaultSavePlanner:
        """Return a planner of class `made_by` with `options`, its `resolve_data` and its final plan noted."""
        planner = _traced_class(made_by)(**options)
        planner.trace = self
        return planner  # type: ignore[no-any-return]

    def watch_writer(self, writer: StorageWriter) -> bool:
        """Note the streams that `writer` opens; False where it opens none that can be wrapped."""
        filesystem = getattr(writer, "fs", None)
        if not isinstance(filesystem, FileSystemBase):
            return False
        # A writer that is kept for several saves was watched before.
        open_stream = getattr(filesystem.create_stream, "unwatched", filesystem.create_stream)

        @contextmanager
        def create_stream(path: Any, mode: str) -> Iterator[Any]:
            with open_stream(path, mode) as stream:
                if "w" not in mode:
                    yield stream
                    return
                traced = _TracedStream(stream, self)
                yield traced
                traced.end()  # not after an error: what is still buffered could only raise another

        create_stream.unwatched = open_stream  # type: ignore[attr-defined]
        filesystem.create_stream = create_stream  # type: ignore[method-assign]
        return True

    @contextmanager
    def running(self) -> Iterator[None]:
        """Take note for the length of the block."""
        logger = torch_private.dcp_logger()
        real_sync = os.sync

        def counted_sync() -> None:
            self._global_syncs += 1
            real_sync()

        logger.addHandler(self._handler)
        os.sync = counted_sync
        try:
            yield
        finally:
            os.sync = real_sync
            logger.removeHandler(self._handler)

    def result(self, called_s: float, returned_s: float, completed_s: float) -> RankTrace:
        """Return what was noted, with the save's own readings and the cost of the noting."""
        return RankTrace(
            called_s=called_s,
            returned_s=returned_s,
            completed_s=completed_s,
            events=self._events,
            items=self._items,
            syncs=self._syncs,
            global_syncs=self._global_syncs,
            tracer_s=self._calls * _call_cost_s(),
            planned_bytes=self._planned_bytes,
        )


class _EventHandler(logging.Handler):
    """Pairs the start and end records of DCP's functions by thread."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__(logging.DEBUG)
        self._events = events
        self._open: dict[tuple[int, str], float] = {}

    def handle(self, record: logging.LogRecord) -> bool:
        """Note one record; without the lock of `logging.Handler`, which writer threads would share."""
        message = record.msg
        if isinstance(message, dict) and "func_name" in message:
            now, thread = _now(), threading.get_ident()
            name = str(message["func_name"])
            if name.startswith(_PER_KEY):
                return True
            name = name.rsplit(".", 1)[-1]
            if message.get("event") == "start":
                self._open[thread, name] = now
            elif (thread, name) in self._open:
                self._events.append(Event(name, thread, self._open.pop((thread, name)), now))
        return True


@cache
def _traced_class(made_by: type[DefaultSavePlanner]) -> Any:
    # A class, as functions put on the planner would refer to it: what it holds of the state would outlive the save.
    return type(f"Traced{made_by.__name__}", (_TracedPlanner, made_by), {})


class _TracedPlanner(DefaultSavePlanner):
    trace: SaveTrace

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """See `SavePlanner.finish_plan`; what this rank is to write is known from here on."""
        plan = super().finish_plan(new_plan)
        self.trace._planned_bytes = planned_bytes(plan)
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """See `SavePlanner.resolve_data`; what follows its return is the copy."""
        start = _now()
        data = super().resolve_data(write_item)
        # An object is serialised in here, a tensor only looked up: its copy begins now.
        self.trace._resolved.at = _now() if hasattr(data, "untyped_storage") else start
        self.trace._calls += 1
        return data


def planned_bytes(plan: SavePlan) -> int:
    """Return the bytes of the tensors with a dimension that a rank's plan has it write, as `logical_bytes` counts."""
    chunks = [item.tensor_data for item in plan.items if item.tensor_data is not None and item.tensor_data.size]
    return sum(math.prod(data.chunk.sizes) * data.properties.dtype.itemsize for data in chunks)


def _timed(write: Callable[[Any], Any]) -> tuple[Callable[[Any], Any], Callable[[], tuple[int, float, float]]]:
    """Return `write` with its time noted, and what was noted so far: calls, their seconds, the end of the last.

    Attributes of an object would cost half as much again as a closure, and a stream that has no unbuffered file below
    it is called some 39 times a tensor.
    """
    calls, seconds, end = 0, 0.0, 0.0
    now = _now

    def timed(data: Any) -> Any:
        nonlocal calls, seconds, end
        start = now()
        count = write(data)
        end = now()
        seconds += end - start
        calls += 1
        return count

    return timed, lambda: (calls, seconds, end)


class _TimedFile(io.RawIOBase):
    """The unbuffered file below a stream, its writes timed: two or three a tensor, where the stream has some 39."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw = raw
        self._timed_write, self.noted = _timed(raw.write)

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._raw.seekable()

    def write(self, data: Any) -> Any:
        return self._timed_write(data)

    def tell(self) -> int:
        return self._raw.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._raw.seek(offset, whence)

    def fileno(self) -> int:
        return self._raw.fileno()


def _traced(stream: Any) -> tuple[Any, Callable[[Any], Any], Callable[[], tuple[int, float, float]]]:
    """Return what to use instead of `stream`, its write, and what was noted of the writes."""
    if not isinstance(stream, io.BufferedWriter):
        return stream, *_timed(stream.write)
    file = _TimedFile(stream.raw)
    buffer = io.BufferedWriter(file, _buffer_bytes(stream.raw))
    return buffer, buffer.write, file.noted


def _buffer_bytes(raw: io.RawIOBase) -> int:
    """Return the buffer that open() gave the stream: another would change what is measured."""
    block = os.fstat(raw.fileno()).st_blksize
    if sys.version_info >= (3, 14):
        return max(min(block, 8 * 2**20), io.DEFAULT_BUFFER_SIZE)
    return block if block > 1 else io.DEFAULT_BUFFER_SIZE


class _TracedStream:
    """The stream a writer opened; DCP calls tell() before and after each item, and fileno() before it syncs."""

    def __init__(self, stream: Any, trace: SaveTrace) -> None:
        self._opened = stream
        self._trace = trace
        self._thread = threading.get_ident()
        self._stream, self.write, self._noted = _traced(stream)
        self._copy_s = self._serialize_s = self._write_s = 0.0
        self._start_bytes = self._counted = 0
        self._in_item = False
        self._sync_s: float | None = None

    def tell(self) -> Any:
        now = _now()
        at = self._stream.tell()
        _, write_s, written_s = self._noted()
        if self._in_item and written_s > self._serialize_s:
            self._end_item(now, at)
        else:
            # Of formats that serialise a whole file at its end, nothing is written between two items.
            self._copy_s = min(getattr(self._trace._resolved, "at", now), now)
            self._serialize_s, self._write_s, self._start_bytes = now, write_s, at
            self._in_item = True
        return at

    def fileno(self) -> int:
        self._end_open_item()
        self._sync_s = _now()
        descriptor: int = self._stream.fileno()
        return descriptor

    def close(self) -> None:
        self.end()
        self._stream.flush()
        self._opened.close()

    def end(self) -> None:
        """Note what is still open; a writer need not close its stream, as DCP does not close that of the metadata."""
        now = _now()
        if not self._opened.closed:
            self._stream.flush()
        self._end_open_item()
        if self._sync_s is not None:
            self._trace._syncs.append(Sync(self._thread, self._sync_s, now))
            self._sync_s = None
        calls = self._noted()[0]
        self._trace._calls += calls - self._counted
        self._counted = calls

    def _end_open_item(self) -> None:
        written_s = self._noted()[2]
        if self._in_item and written_s > self._serialize_s:
            self._end_item(written_s, self._stream.tell())

    def _end_item(self, end_s: float, end_bytes: int) -> None:
        write_s = self._noted()[1] - self._write_s
        written = end_bytes - self._start_bytes
        self._trace._items.append(Item(self._thread, self._copy_s, self._serialize_s, end_s, write_s, written))
        self._in_item = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_COST_S: list[float] = []


def _call_cost_s() -> float:
    """Return what one traced call costs beyond the call itself, measured once in this process: the least of ten."""
    if not _COST_S:
        with open(os.devnull, "wb") as bare, open(os.devnull, "wb") as below:
            traced = _TracedStream(below, SaveTrace())
            least = [min(times) for times in zip(*((_write_s(bare), _write_s(traced)) for _ in range(10)), strict=True)]
        _COST_S.append(max(0.0, least[1] - least[0]))
    return _COST_S[0]


def _write_s(stream: Any) -> float:
    """Return the seconds of one small write, flushed: the mean of a thousand."""
    count = 1000
    start = _now()
    for _ in range(count):
        stream.write(b".")
        stream.flush()
    return (_now() - start) / count
