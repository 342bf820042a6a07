"""What is seen while saves run, written only through pytest's terminal reporter."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from pytest_ckpt.units import format_bytes, format_rate, format_seconds

_PLAIN_INTERVAL_S = 30.0
_TTY_INTERVAL_S = 0.5


class TerminalProgress:
    """Shows what goes on: a line that rewrites itself on a terminal, else a plain line now and then."""

    def __init__(
        self,
        config: pytest.Config,
        title: str,
        written_bytes: Callable[[str], int],
        interval_s: float | None = None,
    ) -> None:
        self._reporter = config.pluginmanager.getplugin("terminalreporter")
        self._capture = config.pluginmanager.getplugin("capturemanager")
        self._quiet = self._reporter is None or config.get_verbosity() < 0
        self._tty = not self._quiet and self._reporter.isatty and self._reporter.hasmarkup
        self._interval_s = interval_s or (_TTY_INTERVAL_S if self._tty else _PLAIN_INTERVAL_S)
        self._title = title
        self._written_bytes = written_bytes
        self._what, self._expected_bytes = "", 0
        self._location: str | None = None
        self._began = self._shown = time.monotonic()
        self._drawn = False

    def step(self, what: str, location: str | None, expected_bytes: int) -> None:
        """See `pytest_ckpt.world.rounds.Progress`."""
        self._what, self._location, self._expected_bytes = what, location, expected_bytes
        self._began = time.monotonic()
        self.poll()

    def poll(self) -> None:
        """See `pytest_ckpt.world.rounds.Progress`."""
        now = time.monotonic()
        if self._quiet or now - self._shown < self._interval_s:
            return
        self._shown = now
        self._write(self._line(now - self._began))

    def done(self) -> None:
        """See `pytest_ckpt.world.rounds.Progress`."""
        if self._drawn and self._tty:
            self._write("")
            self._reporter.rewrite("")  # the next line starts where this one stood

    def say(self, line: str) -> None:
        """Write a line that stays, unless the user asked for quiet."""
        if not self._quiet:
            self._write(line, stays=True)

    def _line(self, elapsed_s: float) -> str:
        parts = [f"ckpt {self._title}: {self._what}"]
        if self._location is not None and self._expected_bytes:
            try:
                written = self._written_bytes(self._location)
            except OSError:  # the folder is not there yet
                written = 0
            parts.append(f"{format_bytes(written)} of {format_bytes(self._expected_bytes)}")
            if 0 < written < self._expected_bytes and elapsed_s > 1:
                rate = written / elapsed_s
                parts.append(format_rate(rate))
                parts.append(f"about {format_seconds((self._expected_bytes - written) / rate)} left")
        parts.append(format_seconds(elapsed_s))
        return ", ".join(parts)

    def _write(self, line: str, stays: bool = False) -> None:
        if self._capture is None:
            self._draw(line, stays)
            return
        with self._capture.global_and_fixture_disabled():
            self._draw(line, stays)

    def _draw(self, line: str, stays: bool) -> None:
        self._reporter.ensure_newline()
        if stays and self._tty and self._drawn:
            self._reporter.rewrite("", erase=True)
            self._reporter.rewrite("")
        if stays:
            self._reporter.write_line(line)
        elif self._tty:
            width = self._reporter._tw.fullwidth - 1
            self._reporter.rewrite(line[:width], erase=True)
        else:
            self._reporter.write_line(line)
        self._reporter.flush()
        self._drawn = not stays
