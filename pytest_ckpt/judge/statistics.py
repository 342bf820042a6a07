"""What could be chance: exact where the samples are few."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

_EXACT_UP_TO = 20


def chance_of_rise(values: Sequence[float]) -> float:
    """Return the chance that values in random order rise at least as steadily as these do (Mann-Kendall, one-sided).

    1/120 for five that rise all the time; 1 for fewer than two.
    """
    count = len(values)
    pairs = count * (count - 1) // 2
    if not pairs:
        return 1.0
    score = sum((later > earlier) - (later < earlier) for earlier, later in combinations(values, 2))
    if count > _EXACT_UP_TO:
        deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
        return 0.5 * math.erfc((score - 1) / deviation / math.sqrt(2))
    orders = _orders_by_inversions(count)
    return sum(orders[: (pairs - score) // 2 + 1]) / math.factorial(count)


def _orders_by_inversions(count: int) -> list[int]:
    """Return how many orders of `count` things have 0, 1, 2 ... pairs out of order."""
    orders = [1]
    for size in range(2, count + 1):
        longer = [0] * (len(orders) + size - 1)
        for inversions, ways in enumerate(orders):
            for more in range(size):
                longer[inversions + more] += ways
        orders = longer
    return orders
