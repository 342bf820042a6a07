"""A scenario that is planned and not saved: the rounds of `rounds.py`, whose `once` is the planning of one save."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from pytest_ckpt.records import Planning, RankRound, Round
from pytest_ckpt.world import planning_commands
from pytest_ckpt.world.functions import FunctionRef, listed
from pytest_ckpt.world.interface import World
from pytest_ckpt.world.rounds import Measured, Progress, RoundsPlan, ScenarioRun, affordable_rounds

T = TypeVar("T")

_NOTE = "planning only: ranks on paper, played by one process; no network and no storage"


class PlanningSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What is planned: plain data."""

    model: str
    state: str
    state_bytes: int
    """Of all ranks: what a save of it would write."""
    options: dict[str, Any] = {}
    """Of the planner."""
    planner: FunctionRef | None = None
    """What makes the planner; None: DCP's own."""


def measure_planning(
    world: World,
    setup: PlanningSetup,
    plan: RoundsPlan,
    progress: Progress,
    clock: Callable[[], float] = time.monotonic,
) -> Measured:
    """Plan saves of `setup` by the ranks on paper of `world`: the first as a training has it, then the rounds.

    The first save is planned with Python's collector running and with no plan in a cache; in the rounds the collector
    is frozen, and with plan caching they find what the first left. Raises as `measure_rounds` does.
    """
    try:
        return _PlanningRun(world, setup, plan, progress, clock).measure()
    finally:
        progress.done()
        world.close()


class _PlanningRun(ScenarioRun):
    noun = "planning"

    def __init__(
        self,
        world: World,
        setup: PlanningSetup,
        plan: RoundsPlan,
        progress: Progress,
        clock: Callable[[], float],
    ) -> None:
        # Nothing is saved: there is no work folder, and what the ranks are told is `setup`.
        super().__init__(world, None, None, plan, progress, clock)  # type: ignore[arg-type]
        self.setup = setup
        self.made: dict[str, Any] = {}
        self.planned: list[dict[str, Any]] = []

    def prepare(self) -> None:
        began = self.clock()
        self.progress.step(f"making {self.world.size} ranks on paper", None, 0)
        ref = self.setup.planner
        (self.made,) = self.run(
            planning_commands.prepare_plans,
            model=self.setup.model,
            state=self.setup.state,
            ranks=self.world.size,
            options=self.setup.options,
            planner=listed(ref),
        )
        self.logical_bytes = self.setup.state_bytes
        self.before_s = self.clock() - began

    def closing_the_engine(self, do: Callable[[], T]) -> T:
        return do()

    def measure(self) -> Measured:
        measured = super().measure()
        first, last = self.planned[0], self.planned[-1]
        planning = Planning(
            **self.made,
            write_items=first["write_items"],
            gathered_bytes=last["gathered_bytes"],
            scattered_bytes=last["scattered_bytes"],
            results_bytes=first["results_bytes"],
            metadata_bytes=last["metadata_bytes"],
            peak_bytes=first["peak_bytes"],
            held_bytes=first["held_bytes"],
            first_gathered_bytes=first["gathered_bytes"],
            first_phases=first["steps"],
        )
        return msgspec.structs.replace(measured, planning=planning, notes=[_NOTE, *measured.notes])

    def _rounds(self, first: Round, spent_s: float) -> tuple[list[Round], list[str]]:
        """Plan the rounds that the time allows, which the first of them tells: the collector made `first` slow."""
        left_s = self.plan.max_time_s - self.before_s - spent_s
        began = self.clock()
        rounds = [self.once(f"round 1 of {self.plan.rounds}")]
        round_s = self.clock() - began
        count = affordable_rounds(self.plan.rounds, round_s, left_s + round_s, rounds[0].save_s, self.noun)
        rounds += [self.once(f"round {number + 1} of {count}") for number in range(1, count)]
        return rounds, self.notes_of(len(rounds))

    def once(self, what: str) -> Round:
        self.progress.step(what, None, 0)
        (planned,) = self.run(planning_commands.plan_round, alone=bool(self.planned))
        self.planned.append(planned)
        seconds = sum(planned["steps"].values())
        own = RankRound(
            save_s=seconds,
            stall_s=seconds,
            peak_rss_bytes=planned["peak_bytes"],
            phases=planned["steps"],
            cpu_s=seconds,
        )
        return Round(
            save_s=seconds,
            stall_s=seconds,
            throughput_Bps=self.logical_bytes / seconds,
            ranks=[own],
            straggler=0,
            peak_rss_bytes=planned["peak_bytes"],
            phases=planned["steps"],
        )
