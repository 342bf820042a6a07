"""What a rank is doing, readable by its parent at any time, also when the rank is stopped or dead.

A rank writes a line into a small memory-mapped file; the parent maps the same file. Nothing travels over the command
channel while a save is timed.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_HEADER = struct.Struct("<Qd")  # length of the text, CLOCK_MONOTONIC of the change
_SIZE = 1024


class Status(NamedTuple):
    """What a rank was last seen doing, and since when (CLOCK_MONOTONIC seconds)."""

    phase: str
    since_s: float


class StatusBoard:
    """A rank's side: the phases that are open, per thread, outermost first."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._lock = threading.Lock()
        self._open: dict[int, list[str]] = {}
        self._publish()

    def enter(self, phase: str) -> None:
        """Note that this thread begins `phase`."""
        with self._lock:
            self._open.setdefault(threading.get_ident(), []).append(phase)
            self._publish()

    def leave(self, phase: str) -> None:
        """Note that this thread ended `phase`, and whatever it had begun within it and never ended."""
        with self._lock:
            phases = self._open.get(threading.get_ident(), [])
            if phase in phases:
                del phases[len(phases) - 1 - phases[::-1].index(phase) :]
            if not phases:
                self._open.pop(threading.get_ident(), None)
            self._publish()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Hold `name` open for the length of the block; it stays to be seen where the block raises."""
        self.enter(name)
        yield
        self.leave(name)

    def clear(self) -> None:
        """Forget all open phases: the next command begins."""
        with self._lock:
            self._open.clear()
            self._publish()

    def text(self) -> str:
        """Return the open phases, the threads separated by `; `."""
        return "; ".join(" > ".join(phases) for phases in list(self._open.values())) or "idle"

    def _publish(self) -> None:
        text = self.text().encode()[: _SIZE - _HEADER.size]
        self._map[_HEADER.size : _HEADER.size + len(text)] = text
        self._map[: _HEADER.size] = _HEADER.pack(len(text), time.monotonic())


def create_status_file(path: Path) -> None:
    """Make the file that a rank's `StatusBoard` and its parent share."""
    path.write_bytes(bytes(_SIZE))


def read_status(path: Path) -> Status:
    """Return what the rank that owns this file last wrote."""
    raw = path.read_bytes()
    length, since_s = _HEADER.unpack(raw[: _HEADER.size])
    text = raw[_HEADER.size : _HEADER.size + min(length, _SIZE)].decode(errors="replace")
    return Status(text or "starting", since_s)
