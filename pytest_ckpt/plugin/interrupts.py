"""Signals that end a session end it in good order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ending_signals_interrupt(ctrl_c: bool = False) -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the session as Ctrl-C does, so that ranks and folders go; other handlers stay.

    `ctrl_c`: of several SIGINTs only the first counts; a launcher hands on what the terminal has sent to all already.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (*_ENDING, *((signal.SIGINT,) if ctrl_c else ()))}
    ours = {n: handler for n, handler in before.items() if handler in (signal.SIG_DFL, signal.default_int_handler)}
    try:
        for number in ours:
            signal.signal(number, _interrupt)
        yield
    finally:
        for number, handler in ours.items():
            if signal.getsignal(number) is _interrupt:  # once one has come, further ones stay ignored to the end
                signal.signal(number, handler)


def ignore_ending_signals() -> None:
    """Let no signal cut short what is left to do, to the end of the process: its launcher ends all ranks."""
    for number in (*_ENDING, signal.SIGINT):
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, signal.SIG_IGN)
    _ignored.clear()


def interrupt_main_thread() -> bool:
    """Have the main thread raise KeyboardInterrupt out of what it waits in; False where no handler is ours."""
    for number in (signal.SIGINT, *_ENDING):
        if signal.getsignal(number) is _interrupt:
            signal.pthread_kill(threading.main_thread().ident or 0, number)
            return True
    return False


def end_ignoring() -> None:
    """Let signals that were ignored since the first one ended the session have their effect again."""
    for number in _ignored:
        signal.signal(number, signal.SIG_DFL)
    _ignored.clear()


_ignored: list[signal.Signals] = []


def _interrupt(number: int, frame: FrameType | None) -> None:
    for each in (
        *_ENDING,
        signal.SIGINT,
    ):  # whoever ends a job often signals twice, and cleaning up must not be cut short by that
        if signal.getsignal(each) is _interrupt:
            signal.signal(each, signal.SIG_IGN)
            _ignored.append(each)
    raise KeyboardInterrupt(f"ended by {signal.Signals(number).name}")
