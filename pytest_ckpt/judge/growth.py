"""How the steps of planning grow with the number of ranks: seconds = a * ranks ** exponent.

The exponent is the slope of log(seconds) over log(ranks), by least squares, with its 95 % interval by Student's t. Of
each size the fastest round counts: what disturbs a round only ever makes it slower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, linear_regression

import msgspec

from pytest_ckpt.judge.scenarios import full_key
from pytest_ckpt.records import SaveRecord
from pytest_ckpt.units import format_seconds

STEEPEST = 1.6
"""A greater exponent fails: twice the ranks take more than three times as long."""
LEAST_SIZES = 4
_KNOWN = {
    "validate": (
        "validate is known to be quadratic: this DCP sweeps a tensor's chunks along its longest dimension, and "
        "compares all with all where that is not the one that is sharded"
    )
}
"""What DCP itself is known for (seen in torch 2.13), by step."""
_KNOWN_STEEPEST = 2.3
"""What is known is quadratic: more is something else."""
LEAST_S = 0.01
"""A step that takes less with the most ranks is nothing to judge."""
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t at 97.5 % for 1, 2 ... 10 degrees of freedom (any table of it); the last one holds, on the safe side."""


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """How one step grows."""

    step: str
    exponent: float
    low: float
    high: float
    """The interval of `exponent`, at 95 %."""
    seconds: dict[int, float]
    """By number of ranks."""

    @property
    def is_too_steep(self) -> bool:
        """Whether it grows faster than may be."""
        return self.exponent > STEEPEST

    @property
    def is_known(self) -> bool:
        """Whether that is what DCP itself is known for."""
        return self.is_too_steep and self.step in _KNOWN and self.exponent < _KNOWN_STEEPEST

    @property
    def word(self) -> str:
        """The exponent in a word or two."""
        for most, word in ((0.3, "hardly grows"), (0.8, "grows slower than linearly"), (1.3, "grows linearly")):
            if self.exponent < most:
                return word
        return "grows quadratically" if self.is_too_steep else "grows faster than linearly"

    def __str__(self) -> str:
        ranks, seconds = list(self.seconds), list(self.seconds.values())
        return (
            f"{self.step} {self.word}: exponent {self.exponent:.2f} ({self.low:.2f} .. {self.high:.2f}), "
            f"{format_seconds(seconds[0])} at {ranks[0]} ranks, {format_seconds(seconds[-1])} at {ranks[-1]}"
        )


class PlanGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """How planning grows: each step that takes any time, the steepest first."""

    steps: list[Growth]
    sizes: list[int]

    @property
    def steepest(self) -> Growth:
        """The step that grows fastest."""
        return self.steps[0]

    @property
    def is_too_steep(self) -> bool:
        """Whether a step grows faster than may be, and that is not known."""
        return any(step.is_too_steep and not step.is_known for step in self.steps)

    @property
    def known(self) -> list[str]:
        """A sentence for each step that grows faster than may be in a way that is known of DCP."""
        return [_KNOWN[step.step] for step in self.steps if step.is_known]

    def __str__(self) -> str:
        verdict = "too steep" if self.is_too_steep else "no step is too steep"
        return f"{verdict} (limit {STEEPEST}): " + "; ".join(map(str, self.steps))


def growth_of(records: Sequence[SaveRecord]) -> PlanGrowth | None:
    """Return how the planning in `records`, one for each number of ranks, grows; None of fewer than four numbers."""
    by_size = {record.scenario.world_size: record for record in records if record.rounds}
    sizes = sorted(by_size)
    if len(sizes) < LEAST_SIZES:
        return None
    names = dict.fromkeys(name for size in sizes for taken in by_size[size].rounds for name in taken.phases)
    fitted = []
    for name in names:
        seconds = {size: min(taken.phases.get(name, 0.0) for taken in by_size[size].rounds) for size in sizes}
        if seconds[sizes[-1]] >= LEAST_S and min(seconds.values()) > 0:
            fitted.append(fit(name, seconds))
    return PlanGrowth(steps=sorted(fitted, key=lambda step: -step.exponent), sizes=sizes) if fitted else None


def fit(step: str, seconds: Mapping[int, float]) -> Growth:
    """Return the exponent of a step that took `seconds`, above zero, by number of ranks: three numbers or more."""
    x, y = [math.log(size) for size in seconds], [math.log(s) for s in seconds.values()]
    slope, intercept = linear_regression(x, y)
    freedom = len(x) - 2
    errors = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    spread = math.sqrt(errors / freedom / sum((a - fmean(x)) ** 2 for a in x))
    half = _T_975[min(freedom, len(_T_975)) - 1] * spread
    return Growth(step=step, exponent=slope, low=slope - half, high=slope + half, seconds=dict(seconds))


def alike(records: Sequence[SaveRecord]) -> list[list[SaveRecord]]:
    """Return the records of planning in groups that differ in nothing but the number of ranks, the fewest first."""
    groups: dict[str, list[SaveRecord]] = {}
    for record in records:
        same = msgspec.structs.replace(record.scenario, world_size=0, mesh="")
        groups.setdefault(full_key(same), []).append(record)
    return [sorted(group, key=lambda record: record.scenario.world_size) for group in groups.values()]
