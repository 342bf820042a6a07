"""What goes wrong in a save on purpose, in a rank, with any writer: it is killed, raises, waits, or finds no space.

A fault is planted in the writer or stager that the engine has prepared for one save, and gone with it.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from pytest_ckpt.errors import CkptError

FILE_LIMIT_BYTES = 64 * 1024
"""`full`: no file may grow beyond (RLIMIT_FSIZE), which a writer meets as it does a full disk."""
HOLD_S = 60.0
_POLL_S = 0.002
_SIGNAL_S = 30.0
"""SIGTERM waits until Python's main thread sees it, which a background thread must not run away from."""


class PlantedError(Exception):
    """What a rank raises where a fault says so."""


class CannotPlant(CkptError):
    """This engine or mode has no place for such a fault; on all ranks alike."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Something that goes wrong once, at one place of a save."""

    at: Literal["stage", "begin", "write", "metadata"]
    """Before staging; before a rank writes; when half of its items are written; before the coordinator's metadata."""
    do: Literal["raise", "kill", "terminate", "sleep", "hold", "full"]
    """`kill` and `terminate`: SIGKILL and SIGTERM. `sleep`: for an hour. `hold`: until the file `go` is there.

    `full`: write on, where no file may grow.
    """
    rank: int | None = None
    """The one on which it happens; None: on each. Metadata is written by rank 0 alone."""
    pids: list[int] = []
    """Whom `kill` and `terminate` end; nobody named: the rank itself."""
    go: str = ""


def plant(engine: Any, fault: Fault, rank: int) -> None:
    """Have `fault` happen in the save that `engine` was prepared for, if it is this rank's; else `CannotPlant`."""
    holder, name = _place(engine, fault.at)
    if fault.rank not in (None, rank):
        return
    original = getattr(holder, name)
    setattr(holder, name, (_HalfWritten if fault.at == "write" else _Before)(original, fault))
    if holder is not engine.writer:
        engine.planted = (holder, name)  # a stager outlives its save


def unplant(engine: Any) -> None:
    """Take back what was planted in a stager."""
    holder, name = getattr(engine, "planted", (None, ""))
    if holder is not None:
        delattr(holder, name)
        del engine.planted


def _place(engine: Any, at: str) -> tuple[Any, str]:
    if getattr(engine, "writer", None) is None:
        raise CannotPlant(f"{type(engine).__name__} has no StorageWriter that a fault could be planted in")
    if at != "stage":
        return engine.writer, "finish" if at == "metadata" else "write_data"
    stager = getattr(engine, "stager", None)
    if stager is not None:
        return stager, "stage"
    if engine.mode.name != "sync" and hasattr(engine.writer, "stage"):
        return engine.writer, "stage"
    raise CannotPlant(f"mode {engine.mode.name} with this writer stages nothing that a fault could be planted in")


class _Before:
    """Does what the fault says, then what was to be done. Pickles with its writer, into DCP's background process."""

    def __init__(self, original: Callable[..., Any], fault: Fault) -> None:
        self.original, self.fault = original, fault

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        happen(self.fault)
        return self.original(*arguments, **named)


class _HalfWritten(_Before):
    """Does what the fault says inside the writer, so that what it does of an error in its own threads is tried too."""

    def __call__(self, plan: Any, planner: Any) -> Any:
        if self.fault.do == "full":
            with _no_file_beyond(FILE_LIMIT_BYTES):
                written = self.original(plan, planner)
                written.wait()
                return written
        return self.original(plan, _HalfResolved(planner, self.fault, len(plan.items) // 2))


class _HalfResolved:
    """A planner that lets the fault happen when it is asked for the data of item number `at`, counted from 0."""

    def __init__(self, planner: Any, fault: Fault, at: int) -> None:
        self._planner, self._fault, self._at, self._asked = planner, fault, at, itertools.count()

    def resolve_data(self, item: Any) -> Any:
        if next(self._asked) == self._at:
            happen(self._fault)
        return self._planner.resolve_data(item)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)


@contextmanager
def _no_file_beyond(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def happen(fault: Fault) -> None:
    """Do what `fault` says, here and now."""
    if fault.do == "raise":
        raise PlantedError(f"planted in {fault.at}")
    if fault.do in ("kill", "terminate"):
        for pid in [*(pid for pid in fault.pids if pid != os.getpid()), os.getpid()]:  # itself last
            os.kill(pid, signal.SIGKILL if fault.do == "kill" else signal.SIGTERM)
        time.sleep(_SIGNAL_S)
    elif fault.do == "sleep":
        time.sleep(3600)
    elif fault.do == "hold":
        deadline = time.monotonic() + HOLD_S
        while not Path(fault.go).exists():
            if time.monotonic() > deadline:
                raise PlantedError(f"held in {fault.at} and not let go within {HOLD_S:.0f} s")
            time.sleep(_POLL_S)
