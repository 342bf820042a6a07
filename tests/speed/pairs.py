"""Statistics of paired figures: the Hodges-Lehmann estimate and its exact Wilcoxon signed-rank interval.

The interval needs no normal distribution and no random numbers; that differences are spread alike to both sides is
what alternating the order of each pair is for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

LEAST_PAIRS = 6
"""With fewer, no interval of 95 % exists (2 / 2**5 is more than 5 %)."""


class Estimate(NamedTuple):
    """A middle, and the interval that holds it with at least the confidence asked for."""

    middle: float
    low: float
    high: float


def ratio(numerators: Sequence[float], denominators: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Return the typical ratio of the pairs, estimated on their logarithms."""
    logs = [math.log(a / b) for a, b in zip(numerators, denominators, strict=True)]
    return Estimate(*(math.exp(value) for value in shift(logs, confidence)))


def shift(differences: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Return the typical difference of the pairs; the interval is without end where there are too few of them."""
    count = len(differences)
    means = sorted((differences[i] + differences[j]) / 2 for i in range(count) for j in range(i, count))
    place = _critical_place(count, 1 - confidence)
    if place == 0:
        return Estimate(median(means), -math.inf, math.inf)
    return Estimate(median(means), means[place - 1], means[-place])


def _critical_place(count: int, error: float) -> int:
    """Return the greatest place c for which the c-th means from below and above leave out at most `error`."""
    # ways[w]: how many of the 2**count choices of signs have the rank sum w.
    ways = [1] + [0] * (count * (count + 1) // 2)
    for rank in range(1, count + 1):
        for total in range(len(ways) - 1, rank - 1, -1):
            ways[total] += ways[total - rank]
    place, below = 0, 0
    while 2 * (below + ways[place]) <= error * 2**count:
        below += ways[place]
        place += 1
    return place


def against_limit(found: Estimate, limit: float) -> tuple[bool, str]:
    """Return whether all of the interval lies above `limit`, and the words for it."""
    if found.low > limit:
        return True, f"falls short (all of it above {limit})"
    return False, f"within {limit}" + ("" if found.high <= limit else " (not shown to be above it)")


def few_pairs(taken: int, wanted: int) -> str | None:
    """Return what to say of fewer pairs than the measurement takes; None for enough."""
    if taken >= wanted:
        return None
    none = f"; no interval exists for fewer than {LEAST_PAIRS}" if taken < LEAST_PAIRS else ""
    return f"{taken} pairs only show that this runs: {wanted} are the measurement{none}"
