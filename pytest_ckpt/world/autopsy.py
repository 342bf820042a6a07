"""Why a command did not complete on all ranks: which of them are at fault, and what they were doing.

Read while the processes still stand. gloo names neither rank nor phase, and one rank's error reaches the others in
disguise, so fault is told apart from consequence here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from pytest_ckpt.save.watch import SHARED_GROUP
from pytest_ckpt.world.interface import FailedRank, RankFailure

# faulthandler's lines, innermost first: a thread that waits for other ranks has one of these files near its top.
_COLLECTIVE = re.compile(r'^  File ".*?/(?:distributed_c10d|_functional_collectives)\.py", line \d+ in (\w+)')
_NEAR_TOP = 4
_OURS = re.compile(r'^  File ".*?/pytest_ckpt/world/rank\.py", line \d+ in reply_to\n(?:  File .*\n?)*', re.M)
_COLLECTIVE_ERROR = re.compile(r"gloo|nccl|c10d|op\.preamble|closed by peer", re.I)


class Raised(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank sends instead of a reply when a command raised."""

    at_s: float
    """CLOCK_MONOTONIC: comparable between the ranks of a host."""
    phase: str
    cause: str
    traceback: str
    origins: list[int]
    """The ranks that DCP says it began in; empty where DCP did not pass it on."""
    is_usage: bool
    """Whether it says that the user's input cannot be used."""
    lost_peer: bool
    """Whether it only says that another rank's connection went away."""
    hints: list[str]


class SeenRank(Protocol):
    """What can be known of a rank from outside, whether it answers, is stuck, stopped or dead."""

    @property
    def rank(self) -> int:
        """Its number."""

    def phase(self) -> str:
        """Return the phases that it last noted."""

    def state(self) -> str:
        """Return what is known of its process, as in `process sleeping`."""

    def is_stopped(self) -> bool:
        """Return whether its process does not run at all any more, though it has not ended."""

    def ended(self) -> str:
        """Return how its process ended, in words."""

    def log_tail(self) -> str:
        """Return the last lines that it wrote, as far as they can be read here."""


R = TypeVar("R", bound=SeenRank)


def examine(
    ranks: Sequence[R],
    raised: Mapping[int, Raised],
    died: set[int],
    silent: set[int],
    limit: str,
    take_stacks: Callable[[Sequence[R]], Mapping[int, str]],
) -> RankFailure:
    """Return the failure of a command in which ranks raised, died or did not answer within `limit`.

    `take_stacks` returns the Python stacks of those of the given ranks that still can show them.
    """
    pending = [seen for seen in ranks if seen.rank in silent]
    stopped = {seen.rank for seen in pending if seen.is_stopped()}
    states = {seen.rank: seen.state() for seen in pending}
    stacks = take_stacks([seen for seen in pending if seen.rank not in stopped])
    culprits = blamed(raised, died) or stuck_ranks(silent, stopped, stacks)
    failed = []
    for seen in ranks:
        at_fault = seen.rank in culprits
        if seen.rank in raised:
            failed.append(_raised(seen, raised[seen.rank], at_fault))
        elif seen.rank in died:
            failed.append(_died(seen))
        elif seen.rank in silent and at_fault and raised:
            failed.append(_named_by_others(seen, raised, stacks.get(seen.rank, "")))
        elif seen.rank in silent:
            failed.append(_silent(seen, states[seen.rank], stacks.get(seen.rank, ""), at_fault, limit))
    return RankFailure(failed)


def blamed(raised: Mapping[int, Raised], died: set[int]) -> set[int]:
    """Return the ranks in which it began: dead ones, else those that DCP names or that raised by themselves."""
    if died:
        return set(died)
    named = {rank for error in raised.values() for rank in error.origins}
    by_themselves = {rank for rank, error in raised.items() if not error.origins and not error.lost_peer}
    if not named and not by_themselves and raised:
        return {min(raised, key=lambda rank: raised[rank].at_s)}
    return named | by_themselves


def stuck_ranks(silent: set[int], stopped: set[int], stacks: Mapping[int, str]) -> set[int]:
    """Return which of the silent ranks hold up the others: stopped ones, else those in no collective, else all."""
    at_work = {rank for rank in silent if collective(stacks.get(rank, "")) is None}
    return stopped or at_work or silent


def collective(stack: str) -> str | None:
    """Return the collective in which a thread of this stack waits for other ranks, or None."""
    for thread in stack.split("\n\n"):
        frames = [line for line in thread.splitlines() if line.startswith("  File ")]
        for frame in frames[:_NEAR_TOP]:
            match = _COLLECTIVE.match(frame)
            if match:
                return match[1]
    return None


def _raised(process: SeenRank, error: Raised, at_fault: bool) -> FailedRank:
    if not at_fault:
        return FailedRank(rank=process.rank, what="waiting", phase=error.phase, cause=f"then {error.cause}")
    shared = bool(_COLLECTIVE_ERROR.search(error.cause))
    return FailedRank(
        rank=process.rank,
        what="raised",
        phase=error.phase,
        cause=error.cause,
        traceback=error.traceback,
        log_tail=process.log_tail(),
        hints=error.hints + (_hints(error.phase) if shared else []),
        is_usage=error.is_usage,
    )


def _named_by_others(process: SeenRank, raised: Mapping[int, Raised], stack: str) -> FailedRank:
    """A rank whose error DCP passed on to others before it could say so itself."""
    error = next(error for error in raised.values() if process.rank in error.origins)
    return FailedRank(
        rank=process.rank,
        what="raised",
        phase=process.phase(),
        cause=error.cause,
        traceback=error.traceback,
        stack=_OURS.sub("", stack),
        log_tail=process.log_tail(),
        hints=error.hints,
    )


def _died(process: SeenRank) -> FailedRank:
    cause = process.ended()
    return FailedRank(rank=process.rank, what="died", phase=process.phase(), cause=cause, log_tail=process.log_tail())


def _silent(process: SeenRank, state: str, stack: str, at_fault: bool, limit: str) -> FailedRank:
    phase = process.phase()
    where = collective(stack)
    cause = state + (f", in the collective {where}" if where else "")
    return FailedRank(
        rank=process.rank,
        what="stuck" if at_fault else "waiting",
        phase=phase,
        cause=f"no reply within {limit}; {cause}" if at_fault else cause,
        stack=_OURS.sub("", stack),
        log_tail="" if stack else process.log_tail(),
        hints=_hints(phase) if at_fault else [],
    )


def _hints(phase: str) -> list[str]:
    if SHARED_GROUP not in phase:
        return []
    return [
        "an async save was started on the process group that training uses; the collectives of both interleave and "
        "deadlock: give the save a dedicated gloo group (process_group=...)"
    ]
