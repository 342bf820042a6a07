"""How often each rule fails a run when nothing changed, and when throughput fell by a fifth.

    python -m tests.judge.simulation [RUNS]

Log-normal noise within and between sessions, and one round in twenty that takes half more to twice as long. Five
sessions of five rounds are the baseline, and a margin of 10 % of throughput is tolerated.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from statistics import NormalDist, mean, median
from typing import NamedTuple
from unittest.mock import patch

from pytest_ckpt.judge import shift as shifts
from pytest_ckpt.judge.shift import shift
from pytest_ckpt.judge.verdict import Rule, decide

MARGIN = Rule().margin
ROUNDS, SESSIONS = 5, 5
OUTLIERS, OUTLIER_FACTORS = 0.05, (1.5, 2.0)
FALLEN = 0.8


class Noise(NamedTuple):
    """Standard deviations of log(seconds)."""

    within: float
    between: float


class Night(NamedTuple):
    """What one judgement has: log(seconds) of the stored sessions, of now, and of a second look."""

    sessions: list[list[float]]
    now: list[float]
    again: list[float]

    @property
    def pool(self) -> list[float]:
        """The rounds of all stored sessions."""
        return [value for session in self.sessions for value in session]


STORAGE = Noise(0.06, 0.03)
"""As MLPerf's storage."""
VM = Noise(0.20, 0.08)
"""A noisy virtual machine."""


def session(rng: random.Random, noise: Noise, slower: float = 0.0) -> list[float]:
    """Return log(seconds) of one session's rounds."""
    middle = slower + rng.gauss(0, noise.between)
    return [
        middle
        + rng.gauss(0, noise.within)
        + (math.log(rng.uniform(*OUTLIER_FACTORS)) if rng.random() < OUTLIERS else 0)
        for _ in range(ROUNDS)
    ]


def night(rng: random.Random, noise: Noise, slower: float = 0.0) -> Night:
    """Return what one night has to judge."""
    stored = [session(rng, noise) for _ in range(SESSIONS)]
    return Night(stored, session(rng, noise, slower), session(rng, noise, slower))


def mean_over_last(night: Night) -> str:
    """pytest-benchmark's way: `--benchmark-compare-fail=mean:10%`, against the last session."""
    ratio = mean(map(math.exp, night.now)) / mean(map(math.exp, night.sessions[-1]))
    return "regressed" if math.log(ratio) > MARGIN else "ok"


def median_over_pool(night: Night) -> str:
    """The median, against all stored sessions."""
    return "regressed" if median(night.now) - median(night.pool) > MARGIN else "ok"


def mann_whitney(night: Night) -> str:
    """Any slowdown that is significant at 5 %, however small."""
    return "regressed" if shift(night.pool, night.now, 0.05).low > 0 else "ok"


def hodges_lehmann(night: Night) -> str:
    """The lower bound of the slowdown exceeds the margin."""
    return decide(shift(night.pool, night.now, 0.05), MARGIN)


def two_looks(night: Night, comparisons: int = 1) -> str:
    """The rule that is built: undecided is an outcome, and one second look is taken."""
    error = Rule(comparisons=comparisons).error
    first = decide(shift(night.pool, night.now, error), MARGIN)
    if first != "undecided":
        return first
    return decide(shift(night.pool, night.now + night.again, error), MARGIN)


RULES: dict[str, Callable[[Night], str]] = {
    "mean > 10 % over the last session": mean_over_last,
    "median > 10 % over the pool": median_over_pool,
    "Mann-Whitney p < 0.05": mann_whitney,
    "Hodges-Lehmann, lower bound > 10 %": hodges_lehmann,
    "the same, three outcomes, two looks": two_looks,
}


def share(
    rule: Callable[[Night], str], noise: Noise, slower: float, runs: int, outcome: str = "regressed", seed: int = 1
) -> float:
    """Return the percentage of `runs` nights that end in `outcome`."""
    rng = random.Random(seed)
    return 100 * sum(rule(night(rng, noise, slower)) == outcome for _ in range(runs)) / runs


def normal_place(base: int, now: int, error: float) -> int:
    """Return the place of the bound by the normal approximation, which is one less than the exact one here."""
    deviation = math.sqrt(base * now * (base + now + 1) / 12)
    return max(0, math.floor(base * now / 2 + NormalDist().inv_cdf(error) * deviation))


def with_normal_bounds(rule: Callable[[Night], str]) -> Callable[[Night], str]:
    """Return `rule` with approximate bounds instead of the exact ones."""

    def approximate(night: Night) -> str:
        with patch.object(shifts, "critical_place", normal_place):
            return rule(night)

    return approximate


def main() -> None:
    """Print the table, and the power of the rule that is built for 1 and for 20 comparisons."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    slower = -math.log(FALLEN)
    print(f"{runs} runs each: percentage that fails when nothing changed / when throughput fell by 20 %")
    for name, rule in RULES.items():
        cells = [f"{share(rule, n, 0, runs):4.0f} / {share(rule, n, slower, runs):3.0f}" for n in (STORAGE, VM)]
        print(f"{name:<40}{cells[0]:>12}{cells[1]:>14}")
    for comparisons in (1, 20):
        for name, noise in (("storage", STORAGE), ("VM", VM)):

            def rule(night: Night, comparisons: int = comparisons) -> str:
                return two_looks(night, comparisons)

            powers = {
                f"-{100 * (1 - left):.0f} %": [share(rule, noise, -math.log(left), runs, o) for o in OUTCOMES]
                for left in (1.0, 0.85, 0.8, 0.7, 0.5)
            }
            print(f"two looks, m = {comparisons}, {name}: regressed (undecided) at a fall of")
            print("   " + ", ".join(f"{fall}: {shown[0]:.0f} ({shown[1]:.0f})" for fall, shown in powers.items()))


OUTCOMES = ("regressed", "undecided")


if __name__ == "__main__":
    main()
