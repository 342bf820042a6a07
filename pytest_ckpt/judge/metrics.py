"""What is judged of a scenario: each metric as a cost of every round, whose logarithm is compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pytest_ckpt.records import PLAN, Round, SaveRecord
from pytest_ckpt.units import format_rate, format_seconds

_LARGEST_EXPONENT = 700.0
"""Of what a float holds."""
Cost = Callable[[SaveRecord, Round], float | None]


@dataclass(frozen=True)
class Metric:
    """A figure of a round. Its cost grows where things become worse; its value is what people read."""

    name: str
    cost: Cost
    """Of a round; None where it is not known."""
    value: Callable[[SaveRecord, float], float]
    """The value that a cost means."""
    show: Callable[[float], str]
    grows_with_cost: bool
    """Whether a greater value is the worse one."""
    modes: str
    """With which the modes begin of which it is judged, or `any`: all but `plan`, which has a metric of its own."""
    once_a_session: bool = False
    """Whether part of it is measured once a session, so that sessions are the sample, and not rounds."""
    least_change: float = 0.0
    """A change of cost below this is nothing that anyone notices, however sure it is."""

    def applies(self, mode: str) -> bool:
        """Return whether it is judged of saves, loads or planning in `mode`."""
        return mode.startswith(self.modes) or (self.modes == "any" and mode != PLAN)

    def costs(self, records: Sequence[SaveRecord]) -> list[float]:
        """Return the logarithms of the costs of all rounds of `records`; nothing where one is not known."""
        known = [cost for record in records for taken in record.rounds if (cost := self.cost(record, taken))]
        return [math.log(cost) for cost in known] if len(known) == sum(len(r.rounds) for r in records) else []

    def change(self, shift: float) -> float:
        """Return the relative change of the value for a shift of the logarithm of the cost."""
        exponent = shift if self.grows_with_cost else -shift
        return math.exp(exponent) - 1 if exponent < _LARGEST_EXPONENT else math.inf


def _efficiency_cost(record: SaveRecord, taken: Round) -> float | None:
    """Return the save over its roofline; without the page cache's term, whose probe differs tenfold from run to run."""
    bounds = record.bounds
    terms = (bounds.storage_s, bounds.copy_s, bounds.serialize_s) if bounds is not None else ()
    roofline_s = max((term for term in terms if term), default=0.0)
    return taken.save_s / roofline_s if roofline_s > 0 else None


METRICS = (
    Metric(
        name="throughput",
        cost=lambda record, taken: taken.save_s,
        value=lambda record, cost: record.logical_bytes / cost,
        show=format_rate,
        grows_with_cost=False,
        modes="any",
    ),
    Metric(
        name="stall",
        cost=lambda record, taken: taken.stall_s,
        value=lambda record, cost: cost,
        show=format_seconds,
        grows_with_cost=True,
        modes="async",
        least_change=0.01,
    ),
    Metric(
        name="planning",
        cost=lambda record, taken: taken.save_s,
        value=lambda record, cost: cost,
        show=format_seconds,
        grows_with_cost=True,
        modes=PLAN,
        least_change=0.01,
    ),
    Metric(
        name="efficiency",
        cost=_efficiency_cost,
        value=lambda record, cost: 1 / cost,
        show=lambda value: f"{100 * value:.3g} %",
        grows_with_cost=False,
        modes="sync",
        once_a_session=True,
    ),
)
