"""The ranks of an attached world, as rank 0 sees them: what came by their connections, and what can be seen of them."""

from __future__ import annotations

import contextlib
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from pytest_ckpt.units import format_seconds
from pytest_ckpt.world.channel import Channel
from pytest_ckpt.world.control import BEAT_S, Hello, Pulse
from pytest_ckpt.world.process import GONE, process_state
from pytest_ckpt.world.rank_thread import IDLE, RankThread
from pytest_ckpt.world.scratch import PREFIX
from pytest_ckpt.world.status import read_status

SILENT_S = 10 * BEAT_S
"""A rank that has not been heard of for so long, on a host that cannot be looked at, is taken as stopped."""
_STOPPED = (psutil.STATUS_STOPPED, getattr(psutil, "STATUS_TRACING_STOP", "tracing-stop"))


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one phase of a test ended on one rank."""

    at: str
    """The test and the phase."""
    kind: str
    """`passed`, `failed`, `skipped`, `xfailed`, or `lost` of a rank that cannot say."""
    text: str = ""
    taken: bool = False
    """Whether another rank took it along: it is no reason of its own."""


class Member:
    """One rank as rank 0 sees it: its connection, and what has come by it."""

    def __init__(self, hello: Hello, channel: Channel) -> None:
        self.hello, self.channel = hello, channel
        self.gone = False
        """Its connection is closed: its process has ended, or is about to."""
        self.stuck = False
        self.replies: dict[int, dict[str, Any]] = {}
        self.outcome: Outcome | None = None
        self.called: tuple[int, str] | None = None
        """The last call that it has begun: its number in the phase, and its name."""
        self.at: str | None = None
        """The test and the phase of it that it entered last."""
        self.left: str | None = None
        """Why it left the session before its end."""
        self.said_bye = False

    @property
    def rank(self) -> int:
        """Its number."""
        return self.hello.rank

    @property
    def is_lost(self) -> bool:
        """Whether nothing more can be expected of it."""
        return self.gone or self.stuck or self.left is not None

    def take(self, message: dict[str, Any]) -> None:
        """Note what came."""
        if "reply" in message:
            self.replies[message["id"]] = message["reply"]
        elif "outcome" in message:
            self.outcome = msgspec.convert(message["outcome"], Outcome)
        elif "called" in message:
            self.called = (message["called"], message["what"])
        elif "at" in message:
            self.at = str(message["at"])
        elif "left" in message:
            self.left = str(message["left"])
        elif "bye" in message:
            self.said_bye = True


class Peer(Member):
    """Another process's rank."""

    def __init__(self, hello: Hello, channel: Channel, pulse: Pulse, is_near: bool) -> None:
        super().__init__(hello, channel)
        self.pulse, self._is_near = pulse, is_near

    def phase(self) -> str:
        """See `SeenRank`; of a process on another host, what it last said."""
        if self._is_near:
            with contextlib.suppress(OSError, struct.error):
                noted = read_status(Path(self.hello.status_file)).phase
                return noted if noted != IDLE else self.at or self.pulse.phase
        return self.pulse.phase

    def state(self) -> str:
        """See `SeenRank`."""
        heard = f"last heard of {format_seconds(time.monotonic() - self.pulse.heard_s)} ago"
        return f"process {process_state(self.hello.pid)}, {heard}" if self._is_near else heard

    def is_stopped(self) -> bool:
        """See `SeenRank`; of a process on another host, whether it has been silent for long."""
        if self._is_near:
            return process_state(self.hello.pid) in _STOPPED
        return time.monotonic() - self.pulse.heard_s > SILENT_S

    def is_dead(self) -> bool:
        """Return whether its process has ended, as far as that is known already."""
        return self.gone or (self._is_near and process_state(self.hello.pid) in (GONE, psutil.STATUS_ZOMBIE))

    def clean(self) -> None:
        """Remove what a rank of this host that was killed could not remove: its scratch folder."""
        folder = Path(self.hello.status_file).parent
        if self._is_near and self.gone and folder.name.startswith(PREFIX):
            shutil.rmtree(folder, ignore_errors=True)

    def ended(self) -> str:
        """See `SeenRank`."""
        return "its process ended and closed its connection; its launcher's report has the exit status"

    def log_tail(self) -> str:
        """Return nothing: what it wrote is in its launcher's log."""
        return ""


class Self(Member):
    """Rank 0 itself, whose thread is reached as the others are."""

    def __init__(self, hello: Hello, thread: RankThread) -> None:
        super().__init__(hello, thread.channel)
        self._thread = thread

    def phase(self) -> str:
        """See `SeenRank`."""
        return self._thread.status.text()

    def state(self) -> str:
        """See `SeenRank`."""
        return "process running"

    def is_stopped(self) -> bool:
        """See `SeenRank`."""
        return False

    def is_dead(self) -> bool:
        """Return False: it is this process."""
        return False

    def ended(self) -> str:
        """See `SeenRank`."""
        return "its thread ended"

    def log_tail(self) -> str:
        """Return nothing: what it wrote is on the screen."""
        return ""
