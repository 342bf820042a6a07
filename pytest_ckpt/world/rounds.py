"""A scenario's rounds, from the controller: prepare, warm up, save again and again, each into a fresh folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from pytest_ckpt.errors import CkptError, NothingSaved, TooSlow
from pytest_ckpt.measure.clocks import clock_offsets, shifted
from pytest_ckpt.measure.resources import PageCacheWatch
from pytest_ckpt.measure.spans import RankTrace, Span
from pytest_ckpt.measure.traced import RankUsage, with_phases, with_usage
from pytest_ckpt.records import Planning, Round, TrainingBeside, summarize_round
from pytest_ckpt.target.interface import WorkFolder
from pytest_ckpt.units import format_seconds
from pytest_ckpt.world import commands
from pytest_ckpt.world.functions import FunctionRef, listed
from pytest_ckpt.world.interface import RankFailure, World

T = TypeVar("T")

_READINGS = ("called", "unblocked", "completed")

LEAST_ROUNDS = 4
"""Fewer cannot be judged, so a time limit may not cut them: it would turn the slowest disk green."""


class Progress(Protocol):
    """Who is told how a scenario goes on."""

    def step(self, what: str, location: str | None, expected_bytes: int) -> None:
        """`what` begins (`round 2 of 5`); a save into `location` will leave about `expected_bytes`."""
        ...

    def poll(self) -> None:
        """Called several times a second while a step goes on."""
        ...

    def done(self) -> None:
        """Nothing goes on any more."""
        ...


class Saving(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks need to know to save: plain data."""

    mode: str
    writer: FunctionRef
    model: str
    state: str
    function: FunctionRef | None
    """A user's own state function instead of a named geometry."""
    reader: FunctionRef | None = None
    """What reads the writer's format back; None: DCP finds that out by the path."""
    options: dict[str, Any] = {}
    """Of the writer, by name."""
    engine: str = "dcp"
    engine_factory: FunctionRef | None = None
    """A user's own engine instead of a known one."""
    train: str | None = None
    """Tokens of a rank in a step (`1x64`) of the training that goes on beside the saves; None: none does."""
    overlap: bool = False
    """Whether another save is under way when one is called."""
    mesh: str | None = None
    """Of the ranks, as `replicate=2,shard=4`; None: full shard."""
    share: str | None = None
    """What part of a bigger job the ranks hold, as `2/64`; None: they are the job."""


class RoundsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How often, and how long that may take."""

    rounds: int
    max_time_s: float
    single: bool = False
    """One save alone, nothing measured for the table (`--benchmark-disable`)."""
    keep_all: bool = False
    keep_failed: bool = False
    trace: bool = True
    """Note where the time goes, at a cost that the record tells."""
    devices: list[str] = []
    """Numbers of the block devices below the target."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    rounds: list[Round]
    first_save: Round
    logical_bytes: int
    stored_bytes: int | None
    folder_bytes: int
    notes: list[str]
    spans: list[list[list[Span]]]
    """For each round, each rank's spans."""
    planning: Planning | None = None
    """Of what was planned alone."""

    def and_again(self, more: Measured, note: str) -> Measured:
        """Return this with the rounds of a second look, whose first save is no round either."""
        return msgspec.structs.replace(
            self,
            rounds=self.rounds + more.rounds,
            spans=self.spans + more.spans,
            notes=list(dict.fromkeys([*self.notes, *more.notes, note])),
        )


def measure_rounds(
    world: World,
    folder: WorkFolder,
    saving: Saving,
    plan: RoundsPlan,
    progress: Progress,
    clock: Callable[[], float] = time.monotonic,
) -> Measured:
    """Run `saving` on `world`: one warm-up save, then the rounds that `plan` allows.

    Raises `RankFailure` as `World.run` does, and `TooSlow` where the warm-up shows that the least number of rounds
    does not fit the time allowed. Old rounds are deleted between the saves, never inside one.
    """
    try:
        return ScenarioRun(world, folder, saving, plan, progress, clock).measure()
    finally:
        progress.done()


class ScenarioRun:
    """The rounds of one scenario: `once` is what a round does, whatever that is."""

    noun = "save"

    def __init__(
        self,
        world: World,
        folder: WorkFolder,
        saving: Saving,
        plan: RoundsPlan,
        progress: Progress,
        clock: Callable[[], float],
    ) -> None:
        self.world, self.folder, self.saving, self.plan = world, folder, saving, plan
        self.progress, self.clock = progress, clock
        self.logical_bytes = 0
        self.stored_bytes: int | None = None
        self.folder_bytes = 0
        self.cache = PageCacheWatch()
        self.spans: list[list[list[Span]]] = []
        self.before_s = 0.0
        """Of the time allowed, what was spent before the warm-up."""

    @property
    def mesh(self) -> str | None:
        """The mesh of the ranks that are at work now."""
        return self.saving.mesh

    def measure(self) -> Measured:
        """Make state and engine, warm up, measure, and close the engine."""
        self.prepare()
        return self.closing_the_engine(self._all)

    def prepare(self) -> None:
        """Have the ranks make the state and the engine."""
        self.progress.step("making the state", None, 0)
        replies = self.run(
            commands.prepare,
            model=self.saving.model,
            state=self.saving.state,
            function=listed(self.saving.function),
            mode=self.saving.mode,
            writer=listed(self.saving.writer),
            reader=listed(self.saving.reader),
            options=self.saving.options,
            engine=self.saving.engine,
            engine_factory=listed(self.saving.engine_factory),
            train=self.saving.train,
            mesh=self.mesh,
            share=self.saving.share,
        )
        self.logical_bytes = max(reply["logical_bytes"] for reply in replies)

    def closing_the_engine(self, do: Callable[[], T]) -> T:
        """Return what `do` does, and close the engine however it ends, unless there are no ranks any more."""
        try:
            done = do()
        except RankFailure:
            raise
        except CkptError:
            self.run(commands.close_engine)
            raise
        self.run(commands.close_engine)
        return done

    def _all(self) -> Measured:
        started = self.clock()
        first = self.once(f"warm-up {self.noun}")
        spent_s = self.clock() - started
        rounds, notes = ([first], []) if self.plan.single else self._rounds(first, spent_s)
        return Measured(
            rounds=rounds,
            first_save=first,
            logical_bytes=self.logical_bytes,
            stored_bytes=self.stored_bytes,
            folder_bytes=self.folder_bytes,
            notes=notes,
            spans=self.spans[-len(rounds) :],
        )

    def _rounds(self, first: Round, spent_s: float) -> tuple[list[Round], list[str]]:
        left_s = self.plan.max_time_s - self.before_s
        count = affordable_rounds(self.plan.rounds, spent_s, left_s, first.save_s, self.noun)
        rounds: list[Round] = []
        began = self.clock() - spent_s
        while len(rounds) < count:
            started = self.clock()
            rounds.append(self.once(f"round {len(rounds) + 1} of {count}"))
            another_ends_s = 2 * self.clock() - started - began
            if len(rounds) >= LEAST_ROUNDS and another_ends_s > left_s:
                break
        return rounds, self.notes_of(len(rounds))

    def notes_of(self, rounds: int) -> list[str]:
        """Return what is to be said of so many rounds."""
        if rounds >= self.plan.rounds:
            return []
        allowed = format_seconds(self.plan.max_time_s)
        return [f"{rounds} of {self.plan.rounds} rounds: more do not fit the {allowed} of --ckpt-max-time"]

    def once(self, what: str) -> Round:
        """Save once, in a step called `what`, into a fresh folder that is deleted afterwards."""
        location = self.folder.new_round(f"{self.saving.model}-{self.saving.mode}")
        earlier = self.folder.new_round(f"{self.saving.model}-earlier") if self.saving.overlap else None
        self.progress.step(what, location, self.logical_bytes)
        self.cache = PageCacheWatch()
        self.cache.look()
        try:
            replies = self.run(
                commands.save_round,
                location=location,
                trace=self.plan.trace,
                devices=self.plan.devices,
                earlier=earlier,
            )
        except BaseException:
            if not (self.plan.keep_failed or self.plan.keep_all):
                for left in filter(None, (location, earlier)):
                    with contextlib.suppress(OSError):  # why the save failed is what people must read
                        self.folder.remove(left)
            raise
        self.progress.step(f"{what}: cleaning", None, 0)
        self.stored_bytes = replies[0]["stored_bytes"]
        self.folder_bytes = self.bytes_left(location)
        if not self.plan.keep_all:
            for left in filter(None, (location, earlier)):
                self.folder.remove(left)
        return self.summarize(replies)

    def bytes_left(self, location: str) -> int:
        """Return the bytes that a save left; `NothingSaved` where that is not even a folder."""
        try:
            return self.folder.bytes_in(location)
        except FileNotFoundError:
            raise NothingSaved(
                f"writer {self.saving.writer} reported success and left nothing at {location}; it must write to the "
                "path that it is given"
            ) from None

    def summarize(self, replies: list[dict[str, Any]]) -> Round:
        """Return the round that the ranks' replies tell of."""
        # Clocks of several hosts have no common axis: there each rank counts from the barrier that all have left.
        hosts = [reply.get("host", 0) for reply in replies]
        origins = [reply["exits_s"][-1] if any(hosts) else 0.0 for reply in replies]
        called_s, unblocked_s, completed_s = (
            [reply[f"{name}_s"] - origin for reply, origin in zip(replies, origins, strict=True)] for name in _READINGS
        )
        one = summarize_round(
            called_s,
            unblocked_s,
            completed_s,
            [reply["peak_rss_bytes"] for reply in replies],
            logical_bytes=self.logical_bytes,
            blocks_until_complete=self.saving.mode == "sync",
        )
        one = with_usage(one, [msgspec.convert(reply, RankUsage) for reply in replies], self.cache)
        if self.saving.overlap:
            one = msgspec.structs.replace(one, earlier_wait_s=max(reply["waited_s"] for reply in replies))
        if self.saving.train is not None:
            one = with_training(one, replies[0].get("train"))
        spans: list[list[Span]] = []
        if self.plan.trace:
            traces = [msgspec.convert(reply["trace"], RankTrace) for reply in replies]
            if any(hosts):
                clocks = clock_offsets([reply["exits_s"] for reply in replies], hosts)
                traces = [shifted(trace, clocks[host].offset_s) for trace, host in zip(traces, hosts, strict=True)]
                one = msgspec.structs.replace(one, clock_error_s=max(clock.error_s for clock in clocks))
            one, spans = with_phases(one, traces)
        self.spans.append(spans)
        return one

    def run(self, command: Callable[..., Any], /, **arguments: Any) -> list[Any]:
        """Run a command on every rank."""
        return self.world.run(command, while_waiting=self._poll, **arguments)

    def _poll(self) -> None:
        self.cache.look()
        self.progress.poll()


def with_training(one: Round, train: dict[str, Any] | None) -> Round:
    """Return the round with what it cost the training; `train` is None of a save that training stood still for."""
    beside = None if train is None else msgspec.convert(train, TrainingBeside)
    return msgspec.structs.replace(
        one,
        train=beside,
        train_slowdown=None if beside is None else beside.slowdown,
        effective_cost_s=one.stall_s + (0.0 if beside is None else beside.lost_s),
    )


def affordable_rounds(wanted: int, round_s: float, max_time_s: float, save_s: float, noun: str = "save") -> int:
    """Return how many of the wanted rounds fit `max_time_s`, the warm-up included, at `round_s` seconds each.

    `round_s` is the whole of a round as the warm-up showed it, `save_s` its save alone. Raises `TooSlow` where the
    least number that can be judged does not fit.
    """
    least = min(wanted, LEAST_ROUNDS)
    count = int(min(wanted, (max_time_s - round_s) / round_s)) if round_s > 0 else wanted
    if count < least:
        raise TooSlow(
            f"too slow for the time allowed: the warm-up {noun} took {format_seconds(save_s)} "
            f"({format_seconds(round_s)} with its preparation and cleaning), so {least} rounds after it need "
            f"{format_seconds((least + 1) * round_s)}; allowed are {format_seconds(max_time_s)} "
            "(--ckpt-max-time, --ckpt-session-time); give more time or a smaller --ckpt-model"
        )
    return count
