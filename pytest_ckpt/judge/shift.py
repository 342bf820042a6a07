"""The shift between two samples: Hodges-Lehmann, with the exact bounds of the Mann-Whitney test.

No normal distribution is assumed, and one outlier in a few rounds moves nothing.
Source: Hollander, Wolfe, Chicken, Nonparametric Statistical Methods, 4.2 and 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist, median
from typing import NamedTuple

_EXACT_UP_TO = 10_000
"""Pairs; the normal approximation differs by less than one place in thousands from there on."""


class Shift(NamedTuple):
    """How much greater the second sample is: its estimate, and a lower and an upper bound, each one-sided."""

    middle: float
    low: float
    """Minus infinity where the samples are too few for a bound."""
    high: float


def shift(base: Sequence[float], now: Sequence[float], error: float) -> Shift:
    """Return by how much `now` exceeds `base`; each bound is wrong with probability `error` at most."""
    differences = sorted(later - earlier for later in now for earlier in base)
    place = critical_place(len(base), len(now), error)
    if place == 0:
        return Shift(median(differences), -math.inf, math.inf)
    return Shift(median(differences), differences[place - 1], differences[-place])


@lru_cache(maxsize=256)
def critical_place(base: int, now: int, error: float) -> int:
    """Return the greatest c for which the c-th least of all differences bounds the shift; 0: none does.

    The bound fails where fewer than c of the `base * now` pairs lie below the true shift, which has the distribution
    of the Mann-Whitney statistic.
    """
    pairs = base * now
    if pairs > _EXACT_UP_TO:
        deviation = math.sqrt(pairs * (base + now + 1) / 12)
        return max(0, math.floor(pairs / 2 - 0.5 + NormalDist().inv_cdf(error) * deviation))
    allowed = error * math.comb(base + now, now)
    place, below = 0, 0
    for ways in _mann_whitney(base, now):
        below += ways
        if below > allowed:
            break
        place += 1
    return place


def sessions_needed(rounds: int, rounds_per_session: int, error: float, most: int = 100) -> int | None:
    """Return how many sessions bound the shift of `rounds` at all; None where `most` do not."""
    counts = (count for count in range(1, most + 1) if critical_place(count * rounds_per_session, rounds, error))
    return next(counts, None)


def _mann_whitney(base: int, now: int) -> list[int]:
    """Return in how many orders of both samples 0, 1, 2 ... pairs are inverted: a Gaussian binomial coefficient."""
    ways = [1] + [0] * (base * now)
    for size in range(1, now + 1):
        for place in range(len(ways) - 1, base + size - 1, -1):
            ways[place] -= ways[place - base - size]
        for place in range(size, len(ways)):
            ways[place] += ways[place - size]
    return ways
