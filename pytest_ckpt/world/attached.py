"""The attached world: ranks that torchrun or srun started, each in a pytest of its own, led by rank 0's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

import msgspec

from pytest_ckpt.errors import CkptError
from pytest_ckpt.units import format_seconds
from pytest_ckpt.world.autopsy import Raised, examine
from pytest_ckpt.world.channel import Channel, encode
from pytest_ckpt.world.control import BEAT_S, Hello, PulseReader, host_numbers, own_stacks, send_quietly
from pytest_ckpt.world.functions import listed, reference
from pytest_ckpt.world.interface import FailedRank, RankFailure
from pytest_ckpt.world.members import SILENT_S, Outcome, Peer, Self
from pytest_ckpt.world.rank_thread import IDLE, RankThread

_POLL_S = 0.2
_GRACE_S = 2.0
"""After the first failure the other ranks get this long to say what they saw."""
_LEFT_GRACE_S = 0.5
"""The same where a rank has come to the end of its test, and no rank can have failed because of that by itself."""
_JOIN_S = 300.0
_JOIN_LIMIT = f"the {_JOIN_S:.0f} s that ranks get to join the process group"
_LEAVE_S = 30.0
_LEAST_WAIT_S = 30.0
"""For the end of a test on other ranks, however short the deadline of a command is."""
_SEND_S = 10.0
_STACK_S = 3.5 * BEAT_S


class LeftTheCall(CkptError):
    """Rank 0 is in a call that all ranks must make, and one is past that, with an outcome of its own."""

    def __init__(self, rank: int, outcome: Outcome) -> None:
        self.rank, self.outcome = rank, outcome
        last = "".join(f": {line}" for line in outcome.text.strip().splitlines()[-1:])
        super().__init__(f"rank {rank} did not take part, since its test {outcome.kind} there{last}")


class WorldBroken(CkptError):
    """The ranks cannot go on together after what happened before."""


class AttachedWorld:
    """The ranks of a job, from rank 0's side. All of them run the same test, and follow where it calls this world.

    A command is sent to each rank's thread, rank 0's own among them. The process group is joined with the first
    command and, where a command failed and all ranks live, anew before the next one.
    """

    start_method = "attached"

    def __init__(
        self,
        thread: RankThread,
        me: Hello,
        links: dict[int, tuple[Channel, Channel, Hello]],
        device: str,
        timeout_s: float,
    ) -> None:
        self.size = len(links) + 1
        self.device = device
        self.timeout_s = timeout_s
        self.broken: str | None = None
        """Why the ranks cannot go on together; None: they can."""
        self._thread = thread
        self.acted_s = time.monotonic()
        """When it last did something together with the other ranks, or for them (CLOCK_MONOTONIC)."""
        self._place, self._in_body, self._call_name = "the start of the session", False, ""
        self._pulses = PulseReader({rank: beats for rank, (_, beats, _) in links.items()}, self._own_pulse)
        peers = [
            Peer(hello, channel, self._pulses.pulses[rank], hello.kernel == me.kernel)
            for rank, (channel, _, hello) in sorted(links.items())
        ]
        self._members: list[Self | Peer] = [Self(me, thread), *peers]
        self.hosts = host_numbers(member.hello for member in self._members)
        """Of each rank, the number of its host."""
        self.host_names = [self._members[self.hosts.index(n)].hello.host for n in range(max(self.hosts) + 1)]
        self._ids = 0
        self._generation = 0
        self._joined = False
        self._calls = 0

    @property
    def peers(self) -> list[Peer]:
        """All ranks but this one."""
        return [member for member in self._members if isinstance(member, Peer)]

    def run(
        self,
        function: Callable[..., Any],
        /,
        *,
        timeout_s: float | None = None,
        while_waiting: Callable[[], None] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """See `World.run`; the other ranks must be in the same call (`begin_call`), or it fails."""
        return self._run(function, self._calls, timeout_s, while_waiting, arguments)

    def keep_house(self, function: Callable[..., Any], /, *, timeout_s: float = 60.0, **arguments: Any) -> list[Any]:
        """Run what has nothing to do with a test, wherever the other ranks wait for this one."""
        return self._run(function, None, timeout_s, None, arguments)

    def renew(self) -> bool:
        """Return False: these ranks are there before the tests and stay until the end."""
        return False

    def close(self) -> None:
        """Have the ranks leave the process group, and what they hold; the next command has them join again."""
        if self._joined:
            self._joined = False
            self._send({"id": self._next_id(), "leave": True})

    # What all ranks do together

    def enter(self, place: str, in_body: bool) -> None:
        """Note where this rank is, and whether tests and fixtures run there, for which the other ranks may wait."""
        self._place, self._in_body, self.acted_s = place, in_body, time.monotonic()

    def overdue(self) -> str | None:
        """Return what other ranks have waited for too long while a test of this one does nothing with them, in words.

        Calls, however long, and what is done between tests are none of this.
        """
        now_s, limit_s = time.monotonic(), max(self.timeout_s, _LEAST_WAIT_S)
        if not self._in_body or self._call_name or now_s - self.acted_s < limit_s:
            return None
        for rank, pulse in self._pulses.pulses.items():
            heard_ago_s = now_s - pulse.heard_s
            if pulse.waits_for and heard_ago_s < SILENT_S and pulse.waits_s + heard_ago_s >= limit_s:
                deadline = "--ckpt-timeout" if limit_s == self.timeout_s else "the least, whatever --ckpt-timeout"
                return f"{pulse.waits_for}, where rank {rank} waits, within {format_seconds(limit_s)} ({deadline})"
        return None

    def forsake(self, reason: str) -> None:
        """Note that the ranks cannot go on together: the session ends after the test."""
        self._break(reason)

    def abandon_all(self, status: int, reason: str) -> None:
        """Tell the other ranks that the session is over, from another thread while this rank's main one is stuck."""
        self._send_peers({"end": status, "reason": reason})
        self._thread.close()

    def begin_call(self, what: str) -> None:
        """Begin the call `what` in which the other ranks follow; `WorldBroken` where they cannot any more."""
        if self.broken is not None:
            raise WorldBroken(self.broken)
        self._calls += 1
        self._call_name, self.acted_s = what, time.monotonic()

    def end_call(self, came_of_it: dict[str, Any]) -> None:
        """Tell the other ranks what came of the call, which they return or raise as well."""
        self._send_peers({"done": self._calls, **came_of_it})
        self._call_name, self.acted_s = "", time.monotonic()

    def agree(self, own: Outcome) -> dict[int, Outcome]:
        """Return how a phase of a test ended on each rank; ranks that wait for one that came to its end are freed.

        A rank that does not say so within the deadline, or died, has an outcome all the same: `lost`.
        """
        self.enter(own.at, in_body=False)
        if own.kind != "passed":
            self._send_peers({"abandon": f"rank 0 {own.kind}: {own.text}"})
        wait_s = max(self.timeout_s, _LEAST_WAIT_S)
        deadline = time.monotonic() + wait_s
        freed: set[int] = set()
        while True:
            waiting = [peer for peer in self.peers if not peer.is_lost and peer.outcome is None]
            for peer in waiting:
                if peer.called is not None and peer.called[0] > self._calls and peer.rank not in freed:
                    freed.add(peer.rank)
                    reason = f"rank {peer.rank} called {peer.called[1]} in {own.at}, and rank 0 did not"
                    send_quietly(peer.channel, {"abandon": reason, "own": True}, _SEND_S)
            if not waiting or time.monotonic() > deadline:
                break
            self._pump(_POLL_S)
        for peer in waiting:
            peer.stuck = True
            self._break(
                f"rank {peer.rank} did not come to the end of {own.at} within {format_seconds(wait_s)} "
                f"(--ckpt-timeout); it was in phase {peer.phase()!r}, {peer.state()}"
            )
        outcomes = {0: own}
        for peer in self.peers:
            said = peer.outcome
            if said is not None and said.at != own.at:
                self._break(f"rank {peer.rank} is at {said.at}, and rank 0 at {own.at}: they run different tests")
            if said is None:
                self._break(self._why_lost(peer))
                said = Outcome(at=own.at, kind="lost", text=self._why_lost(peer))
            outcomes[peer.rank] = said
            peer.outcome, peer.called = None, None
        self._calls = 0
        return outcomes

    def tell(self, verdict: dict[str, Any]) -> None:
        """Tell all ranks how the phase ended for all."""
        self._send_peers({"verdict": verdict})

    def lost_ranks(self, within_s: float = 0.0) -> dict[int, str]:
        """Return a sentence about each rank that has died; its end may take `within_s` seconds to be seen."""
        deadline = time.monotonic() + within_s
        while True:
            self._pump(0)
            for peer in self.peers:
                peer.gone |= peer.is_dead() and not peer.said_bye
            lost = {peer.rank: self._why_lost(peer) for peer in self.peers if peer.gone}
            if lost or time.monotonic() >= deadline:
                return lost
            time.sleep(0.05)

    def end(self, status: int, reason: str, wait_s: float) -> bool:
        """Tell all ranks that the session is over, and its exit status; wait until they have heard it.

        Returns whether this process can end in the ordinary way.
        """
        self._send_peers({"end": int(status), "reason": reason})
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and any(not (p.said_bye or p.gone or p.stuck) for p in self.peers):
            self._pump(_POLL_S)
        self._pulses.close()
        ended = self._thread.close()
        for peer in self.peers:
            peer.channel.close()
            if not peer.said_bye:
                peer.clean()
        return ended

    # Commands

    def _run(
        self,
        function: Callable[..., Any],
        call: int | None,
        timeout_s: float | None,
        while_waiting: Callable[[], None] | None,
        arguments: dict[str, Any],
    ) -> list[Any]:
        ref = reference(function, "function")
        command = {"function": listed(ref), "arguments": arguments, "call": call}
        encode(command)  # what is no plain data is refused before any rank is told
        if self.broken is not None:
            raise WorldBroken(self.broken)
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        if not self._joined:
            self._generation += 1
            setup = {"generation": self._generation, "hosts": self.hosts if max(self.hosts) else []}
            self._tell({"join": setup}, _JOIN_S, _JOIN_LIMIT, while_waiting)
            self._joined = True
        return self._tell(command, timeout_s, f"{format_seconds(timeout_s)} (--ckpt-timeout)", while_waiting)

    def _tell(
        self, command: dict[str, Any], timeout_s: float, limit: str, while_waiting: Callable[[], None] | None
    ) -> list[Any]:
        """Send every rank the command and return their replies in order, or raise what `examine` finds."""
        number = self._next_id()
        self._send({"id": number, **command})
        deadline = time.monotonic() + timeout_s
        values: dict[int, Any] = {}
        raised: dict[int, Raised] = {}
        died: set[int] = set()
        left: dict[int, Outcome] = {}
        done: set[int] = set()
        in_grace = False
        try:
            while len(done) < self.size and time.monotonic() < deadline:
                self._pump(min(_POLL_S, max(0.0, deadline - time.monotonic())))
                for member in [m for m in self._members if m.rank not in done]:
                    if number in member.replies:
                        reply = member.replies.pop(number)
                        if "value" in reply:
                            values[member.rank] = reply["value"]
                        else:
                            raised[member.rank] = msgspec.convert(reply["error"], Raised)
                    elif member.gone:
                        died.add(member.rank)
                    elif member.left is not None:
                        left[member.rank] = Outcome(at="", kind="ended", text=member.left)
                    elif member.outcome is not None and command.get("call") is not None:
                        left[member.rank] = member.outcome
                    else:
                        continue
                    done.add(member.rank)
                if not in_grace and (raised or died or left):
                    grace_s = _GRACE_S if raised or died else _LEFT_GRACE_S
                    in_grace, deadline = True, min(deadline, time.monotonic() + grace_s)
                if while_waiting is not None and not in_grace:
                    while_waiting()
        except KeyboardInterrupt:  # torchrun ends all of its ranks when one has died
            if not self.lost_ranks(_GRACE_S):
                raise
            died |= {peer.rank for peer in self.peers if peer.gone} - set(values)
        if len(values) == self.size:
            return [values[rank] for rank in range(self.size)]
        silent = {m.rank for m in self._members} - values.keys() - raised.keys() - died - left.keys()
        raise self._failed(raised, died, left, silent, limit, waited=not in_grace)

    def _failed(
        self,
        raised: dict[int, Raised],
        died: set[int],
        left: dict[int, Outcome],
        silent: set[int],
        limit: str,
        waited: bool,
    ) -> CkptError:
        failure: CkptError
        if left and not died and not raised:
            rank, outcome = min(left.items(), key=lambda item: (item[1].taken, item[0]))
            failure = LeftTheCall(rank, outcome)
        else:
            ranks_failure = examine(self._members, raised, died, silent, limit, self._take_stacks)
            for rank, outcome in left.items():
                cause = f"then its test {outcome.kind}: {outcome.text}"
                ranks_failure.failed.append(FailedRank(rank=rank, what="waiting", phase="the test", cause=cause))
            failure = RankFailure(ranks_failure.failed)
            if waited:
                for culprit in failure.culprits:
                    self._members[culprit.rank].stuck = culprit.rank in silent
        self._recover(failure, silent, must_end=bool(died) or waited)
        return failure

    def _recover(self, failure: CkptError, silent: set[int], must_end: bool) -> None:
        """Have the ranks leave the process group, so that the next command finds a fresh one, or note why they cannot.

        The groups of ranks that are free close, and that ends what the others still wait for in them.
        """
        first = str(failure).splitlines()[0]
        if must_end:
            self._break(f"the ranks cannot go on together: {first}")
            return
        if silent and not self._thread.owns_group:
            self._break(f"the process group that the tests initialised cannot be trusted any more: {first}")
            return
        self._joined = False
        number = self._next_id()
        self._send({"id": number, "leave": True})
        deadline = time.monotonic() + _LEAVE_S
        while time.monotonic() < deadline and not all(number in m.replies or m.is_lost for m in self._members):
            self._pump(_POLL_S)
        still = [str(m.rank) for m in self._members if number not in m.replies]
        if still:
            self._break(
                f"rank {', '.join(still)} did not come out of a failed command within {_LEAVE_S:.0f} s: {first}"
            )

    def _break(self, reason: str) -> None:
        self.broken = self.broken or reason

    def _why_lost(self, peer: Peer) -> str:
        if peer.gone:
            return f"rank {peer.rank} died in phase {peer.phase()!r}: {peer.ended()}"
        if peer.left is not None:
            return f"rank {peer.rank} left the session: {peer.left}"
        return f"rank {peer.rank} is stuck in phase {peer.phase()!r}: {peer.state()}"

    def _take_stacks(self, members: Sequence[Self | Peer]) -> dict[int, str]:
        stacks = {member.rank: own_stacks() for member in members if isinstance(member, Self)}
        asked = [member for member in members if isinstance(member, Peer)]
        for peer in asked:
            peer.pulse.stacks, peer.pulse.wants_stacks = None, True
        deadline = time.monotonic() + _STACK_S
        while time.monotonic() < deadline and any(peer.pulse.stacks is None for peer in asked):
            time.sleep(0.05)
        for peer in asked:
            peer.pulse.wants_stacks = False
            if peer.pulse.stacks is not None:
                stacks[peer.rank] = peer.pulse.stacks
        return stacks

    def _own_pulse(self) -> dict[str, Any]:
        doing = self._thread.status.text()
        place = ", ".join([self._place, *([self._call_name] if self._call_name else [])])
        place += f", phase {doing!r}" if doing != IDLE else ""
        return {"place": place, "idle_s": time.monotonic() - self.acted_s}

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

    def _send(self, message: dict[str, Any]) -> None:
        data = encode(message)
        for member in self._members:
            if not member.is_lost:
                _send_quietly(member.channel, data)

    def _send_peers(self, message: dict[str, Any]) -> None:
        data = encode(message)
        for peer in self.peers:
            if not peer.gone:
                _send_quietly(peer.channel, data)

    def _pump(self, timeout_s: float) -> None:
        """Take what has come, and wait for it so long where nothing has."""
        self.acted_s = time.monotonic()
        open_ones = {member.channel.fileno(): member for member in self._members if not member.gone}
        for descriptor in wait(list(open_ones), timeout=timeout_s):
            assert isinstance(descriptor, int)
            member = open_ones[descriptor]
            try:
                member.take(member.channel.receive(_SEND_S))
            except (EOFError, TimeoutError, OSError):  # TimeoutError: stopped in the middle of a message
                member.gone = True


def _send_quietly(channel: Channel, data: bytes) -> None:
    try:
        channel.send_encoded(data, _SEND_S)
    except OSError:  # dead or stopped: seen, and named, where something is awaited of it
        return
