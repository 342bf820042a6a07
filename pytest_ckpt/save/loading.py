"""One load on its rank: timed, and watched as closely as DCP's own events tell."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from torch.distributed.checkpoint.stateful import Stateful

from pytest_ckpt.errors import SettingError
from pytest_ckpt.measure.spans import Event, RankTrace
from pytest_ckpt.model.share import PARTIAL
from pytest_ckpt.save.dcp import DcpEngine
from pytest_ckpt.save.engine import Engine, TimedSave
from pytest_ckpt.save.readers import require_found_by_path
from pytest_ckpt.save.trace import SaveTrace


def require_loadable(engine: Engine, location: str) -> None:
    """Raise `SettingError` where what lies at `location` is no whole checkpoint, or DCP needs a reader for it."""
    if os.path.exists(os.path.join(location, PARTIAL)):
        raise SettingError(f"{location} holds a part of a checkpoint (see {PARTIAL} there), which cannot be loaded")
    if isinstance(engine, DcpEngine) and engine.make_reader is None:
        require_found_by_path(location)


def timed_load(engine: Engine, state_dict: dict[str, Any], location: str) -> TimedSave:
    """Load with `engine`: this rank's readings before the call and when its state is loaded."""
    called = time.monotonic()
    engine.load(state_dict, location)
    done = time.monotonic()
    return TimedSave(called, done, done, done)


class WatchedLoad:
    """Notes what happens while a load runs; loads into `state_dict`, which stands for the one it was made of."""

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self._trace = SaveTrace()
        self._restored: list[Event] = []
        self._given = state_dict
        self.state_dict = {
            k: _Noted(v, self._restored) if isinstance(v, Stateful) else v for k, v in state_dict.items()
        }

    @contextmanager
    def running(self) -> Iterator[None]:
        """Take note for the length of the block."""
        with self._trace.running():
            yield

    def result(self, timed: TimedSave) -> RankTrace:
        """Return what was noted, and hand what was loaded and is no `Stateful` to the dictionary that was given."""
        self._given.update({k: v for k, v in self.state_dict.items() if not isinstance(v, _Noted)})
        own = self._trace.result(timed.called_s, timed.returned_s, timed.completed_s)
        return msgspec.structs.replace(own, events=[*own.events, *self._restored])


class _Noted(Stateful):
    """A `Stateful` whose calls are noted: DCP tells nothing of them while it loads."""

    def __init__(self, stateful: Stateful, events: list[Event]) -> None:
        self._stateful, self._events = stateful, events

    def state_dict(self) -> dict[str, Any]:
        """See `Stateful`."""
        begin = time.monotonic()
        taken = self._stateful.state_dict()
        self._events.append(Event("_stateful_to_state_dict", threading.get_ident(), begin, time.monotonic()))
        return taken

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Stateful`."""
        begin = time.monotonic()
        self._stateful.load_state_dict(state_dict)
        self._events.append(Event("load_state_dict", threading.get_ident(), begin, time.monotonic()))
