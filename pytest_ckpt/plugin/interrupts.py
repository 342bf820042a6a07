"""Signals that end a session end it in good order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ending_signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the session as Ctrl-C does, so that ranks and folders go; other handlers stay."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in _ENDING if signal.getsignal(number) == signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, _interrupt)
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) is _interrupt:  # once one has come, further ones stay ignored to the end
                signal.signal(number, signal.SIG_DFL)


def end_ignoring() -> None:
    """Let signals that were ignored since the first one ended the session have their effect again."""
    for number in _ignored:
        signal.signal(number, signal.SIG_DFL)
    _ignored.clear()


_ignored: list[signal.Signals] = []


def _interrupt(number: int, frame: FrameType | None) -> None:
    for each in _ENDING:  # whoever ends a job often signals twice, and cleaning up must not be cut short by that
        if signal.getsignal(each) is _interrupt:
            signal.signal(each, signal.SIG_IGN)
            _ignored.append(each)
    raise KeyboardInterrupt(f"ended by {signal.Signals(number).name}")
