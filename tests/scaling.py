"""How the work of a function grows with the size of its input: a ratio within one run, whatever the machine does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def growth_exponent(make: Callable[[int], T], work: Callable[[T], object], small: int, large: int) -> float:
    """Return e of `CPU seconds ~ size ** e` between two sizes; making the input is not timed. Linear work shows 1."""
    seconds = [_least_cpu_s(work, make(size)) for size in (small, large)]
    return math.log(seconds[1] / seconds[0]) / math.log(large / small)


def _least_cpu_s(work: Callable[[T], object], given: T) -> float:
    taken = []
    for _ in range(3):
        began = time.process_time()
        work(given)
        taken.append(time.process_time() - began)
    return min(taken)
