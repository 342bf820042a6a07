"""Rank 0 is watched, too: a thread of it ends a test body that does nothing while other ranks wait for it.

No command is running then, so that no command's deadline passes; and whoever waits cannot see where rank 0 sits.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

_LOOK_S = 0.5
_REACT_S = 10.0
"""The main thread gets so long to come out of what it was interrupted in."""
_FRAMEWORK = ("/_pytest/", "/pluggy/", "/pytest_ckpt/plugin/")


class Watched(Protocol):
    """Rank 0, as far as it is watched."""

    def overdue(self) -> str | None:
        """Return what other ranks have waited for too long, in words; None: for nothing."""

    def forsake(self, reason: str) -> None:
        """Note, in the watching thread, that the ranks cannot go on together."""

    @property
    def acted_s(self) -> float:
        """When the main thread last did something together with other ranks, or for them (CLOCK_MONOTONIC)."""


class BodyWatch:
    """A thread that interrupts the main thread where it is overdue, and gives up where that does not react."""

    def __init__(self, watched: Watched, interrupt: Callable[[], bool], give_up: Callable[[str], None]) -> None:
        """`interrupt` has the main thread raise KeyboardInterrupt, if it can; `give_up` ends the process."""
        self.reason: str | None = None
        """Why the main thread was interrupted; None: it was not, or not by this."""
        self._watched, self._interrupt, self._give_up = watched, interrupt, give_up
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ckpt-body-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join(2 * _LOOK_S)

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            overdue = self._watched.overdue()
            if overdue is None:
                continue
            self.reason = f"rank 0 did not come to {overdue}: its test sits in {_where_main_thread_sits()}"
            self._watched.forsake(self.reason.splitlines()[0])
            if not self._came_out():
                self._give_up(self.reason)
                return

    def _came_out(self) -> bool:
        acted_s, deadline = self._watched.acted_s, time.monotonic() + _REACT_S
        if not self._interrupt():
            return False
        while time.monotonic() < deadline:
            if self._watched.acted_s != acted_s or self._closed.wait(0.05):
                return True
        return False


def _where_main_thread_sits() -> str:
    """Return file, line and function, then the stack of the main thread without pytest's part."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame)
    ours = [n for n, entry in enumerate(stack) if any(part in entry.filename for part in _FRAMEWORK)]
    shown = traceback.StackSummary.from_list(stack[ours[-1] + 1 :] if ours else stack) or stack
    last = shown[-1]
    return f"{Path(last.filename).name}:{last.lineno} ({last.name})\n{''.join(shown.format())}".rstrip()
