"""What a rank is doing, readable by its parent at any time, also when the rank is stopped or dead.

A rank writes a line into a small memory-mapped file; the parent reads the same file. Nothing travels over the command
channel while a save is timed.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_HEADER = struct.Struct("<Qd")  # length of the text, CLOCK_MONOTONIC of the change
_SIZE = 1024
_MARK = "_ckpt_phase"


class Status(NamedTuple):
    """What a rank was last seen doing, and since when (CLOCK_MONOTONIC seconds)."""

    phase: str
    since_s: float


class StatusBoard:
    """A rank's side: the phases that are open, outermost first, of its own thread and of those in the background."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self.main = threading.get_ident()
        """The thread whose phases are the rank's own; those of others are in the background."""
        self._lock = threading.Lock()
        self._open: dict[Hashable, list[str]] = {}
        self._publish()

    def enter(self, phase: str, owner: Hashable = None) -> None:
        """Note that this thread begins `phase`; with an `owner`, any thread may end it."""
        with self._lock:
            self._open.setdefault(owner or threading.get_ident(), []).append(phase)
            self._publish()

    def leave(self, phase: str, owner: Hashable = None) -> None:
        """Note that `phase` ended, and whatever had begun within it and never ended."""
        owner = owner or threading.get_ident()
        with self._lock:
            phases = self._open.get(owner, [])
            if phase in phases:
                del phases[len(phases) - 1 - phases[::-1].index(phase) :]
            if not phases:
                self._open.pop(owner, None)
            self._publish()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Hold `name` open for the length of the block; an exception that leaves it is marked with its phase."""
        self.enter(name)
        try:
            yield
        except BaseException as error:
            self.mark(error)
            raise
        finally:
            self.leave(name)

    def mark(self, error: BaseException) -> None:
        """Note on `error` which phases are open, unless it was marked further in."""
        if not hasattr(error, _MARK):
            with suppress(Exception):  # an exception class with slots takes no mark
                setattr(error, _MARK, self.text())

    def phase_of(self, error: BaseException) -> str:
        """Return the phases that were open where `error` began."""
        chain: BaseException | None = error
        while chain is not None:
            if hasattr(chain, _MARK):
                return str(getattr(chain, _MARK))
            chain = chain.__cause__ or chain.__context__
        return self.text()

    def clear(self) -> None:
        """Forget all open phases: the next command begins."""
        with self._lock:
            self._open.clear()
            self._publish()

    def text(self) -> str:
        """Return the open phases: `save_round; in the background: save > write_data`."""
        parts = []
        for owner, phases in list(self._open.items()):
            in_background = isinstance(owner, int) and owner != self.main
            parts.append(("in the background: " if in_background else "") + " > ".join(phases))
        return "; ".join(parts) or "idle"

    def _publish(self) -> None:
        text = self.text().encode(errors="replace")[: _SIZE - _HEADER.size]
        record = _HEADER.pack(len(text), time.monotonic()) + text
        self._map[: len(record)] = record  # one copy, so that a reader hardly ever sees half of it


def create_status_file(path: Path) -> None:
    """Make the file that a rank's `StatusBoard` and its parent share."""
    path.write_bytes(bytes(_SIZE))


def read_status(path: Path) -> Status:
    """Return what the rank that owns this file last wrote."""
    raw = path.read_bytes()
    length, since_s = _HEADER.unpack(raw[: _HEADER.size])
    text = raw[_HEADER.size : _HEADER.size + min(length, _SIZE)].decode(errors="replace")
    return Status(text or "starting", since_s)
