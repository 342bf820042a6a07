"""What the ranks above 0 of an attached world do: follow rank 0 wherever the test calls what all ranks do together."""

from __future__ import annotations

import contextlib
import time
from multiprocessing.connection import wait
from typing import Any

import msgspec

from pytest_ckpt.errors import CkptError
from pytest_ckpt.units import format_seconds
from pytest_ckpt.world.channel import Channel
from pytest_ckpt.world.control import Heart, send_quietly
from pytest_ckpt.world.members import Outcome
from pytest_ckpt.world.rank_thread import IDLE, RankThread

_POLL_S = 1.0
_SEND_S = 10.0
_SLACK_S = 120.0
"""Rank 0 notices first, and says so, where its own test or another rank hangs; this is for where it cannot."""


class TakenAlong(CkptError):
    """The call ended here because of another rank."""


class Diverged(CkptError):
    """This rank made a call that rank 0 did not make: its test went another way."""


class SessionEnded(CkptError):
    """Rank 0 has ended the session, or is gone."""

    def __init__(self, status: int, reason: str) -> None:
        self.status, self.reason = status, reason
        super().__init__(reason)


class Follower:
    """One rank's side of an attached world: relays rank 0's commands to its own thread, and hears how calls end."""

    def __init__(self, thread: RankThread, commands: Channel, beats: Channel, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.place = "between tests"
        """Where the test is, for signs of life."""
        self._thread, self._channel = thread, commands
        self._calls = 0
        self._waits = ("", 0.0)
        self._heart = Heart(beats, self._phase, lambda: self._waits)
        self._following = False
        self._ended: SessionEnded | None = None
        self._told = False

    def enter(self, place: str) -> None:
        """Note where the test is, and tell rank 0: it names that where this rank dies."""
        self.place = place
        self._send({"at": place})

    def follow(self, what: str) -> dict[str, Any]:
        """Do what rank 0 says until it has come to the end of the call `what`, and return what came of that there."""
        self._calls += 1
        self._send({"called": self._calls, "what": what})
        self._following = True
        self._waits = (what, time.monotonic())
        try:
            while True:
                message = self._next(f"rank 0 to go on in {what}")
                if message.get("done") == self._calls:
                    self._heart.rank_0_place, self._heart.heard_s = self.place, time.monotonic()
                    return message
                if "abandon" in message:
                    raise (Diverged if message.get("own") else TakenAlong)(message["abandon"])
        finally:
            self._following = False
            self._waits = ("", 0.0)

    def agree(self, own: Outcome) -> dict[str, Any]:
        """Tell rank 0 how a phase of the test ended here, and return how it ended for all."""
        self._send({"outcome": msgspec.to_builtins(own)})
        self._waits = (f"the end of {own.at}", time.monotonic())
        try:
            while True:
                message = self._next(f"rank 0 to come to the end of {own.at}")
                if "verdict" in message:
                    self._calls = 0
                    verdict: dict[str, Any] = message["verdict"]
                    return verdict
        finally:
            self._waits = ("", 0.0)

    def leave(self, reason: str) -> None:
        """Tell rank 0 that this rank leaves before the end of the session."""
        self._send({"left": reason})

    def wait_for_end(self, timeout_s: float) -> int | None:
        """Return the exit status of the session as rank 0 has it; None where it did not tell."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(SessionEnded):
            while True:
                self._next("rank 0 to end the session", deadline)
        self._send({"bye": True})
        return self._ended.status if self._ended is not None and self._told else None

    @property
    def why_ended(self) -> str | None:
        """Why the session is over for this rank; None: it is not."""
        return self._ended.reason if self._ended is not None else None

    def close(self) -> bool:
        """End this rank's thread and connections; False where a command holds the thread."""
        self._heart.close()
        ended = self._thread.close()
        self._channel.close()
        return ended

    def _phase(self) -> str:
        doing = self._thread.status.text()
        return self.place if doing == IDLE else doing

    def _send(self, message: dict[str, Any]) -> None:
        send_quietly(self._channel, message, _SEND_S)

    def _next(self, awaited: str, deadline: float | None = None) -> dict[str, Any]:
        """Return rank 0's next message that is not for the thread, and relay those that are, and its replies."""
        if self._ended is not None:
            raise self._ended
        began_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            # A call may take as long as it likes, while rank 0 goes on in it.
            since_s = max(began_s, self._heart.rank_0_acted_s)
            if now_s > (deadline or since_s + 2 * self.timeout_s + _SLACK_S):
                raise self._end(1, f"waited too long for {awaited}; rank 0 was in {self._heart.rank_0_place}")
            self._require_sign_of_life()
            ready = wait([self._channel.fileno(), self._thread.channel.fileno()], timeout=_POLL_S)
            if self._thread.channel.fileno() in ready:
                self._send(self._thread.channel.receive())
            if self._channel.fileno() in ready and (message := self._receive()) is not None:
                return message

    def _receive(self) -> dict[str, Any] | None:
        try:
            message: dict[str, Any] = self._channel.receive(self.timeout_s)
        except (EOFError, TimeoutError, OSError):
            age_s = time.monotonic() - self._heart.heard_s
            place = self._heart.rank_0_place
            raise self._end(1, f"rank 0 is gone; {format_seconds(age_s)} before, it was in {place}") from None
        if "end" in message:
            raise self._end(message["end"], message["reason"], told=True)
        if "function" in message:
            if message["call"] is None or (self._following and message["call"] == self._calls):
                self._thread.channel.send(message)
            return None
        if "join" in message or "leave" in message:
            self._thread.channel.send(message)
            return None
        return message

    def _require_sign_of_life(self) -> None:
        silent_s = time.monotonic() - self._heart.heard_s
        if silent_s > self.timeout_s + _SLACK_S:
            raise self._end(1, f"rank 0 has not been heard of for {format_seconds(silent_s)}")

    def _end(self, status: int, reason: str, told: bool = False) -> SessionEnded:
        self._ended, self._told = SessionEnded(status, reason), told
        return self._ended
