"""The shift of two samples and its bounds: against scipy, and by their own promise."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_ckpt.judge.shift import Shift, critical_place, sessions_needed, shift

samples = st.lists(st.integers(-1000, 1000), min_size=1, max_size=7, unique=True)


@given(base=st.integers(1, 7), now=st.integers(1, 7), error=st.sampled_from([0.2, 0.05, 0.025, 0.01, 0.001]))
def test_place_is_that_of_all_orders_counted_one_by_one(base: int, now: int, error: float) -> None:
    inversions = [
        sum(1 for chosen in places for other in range(base + now) if other not in places and other > chosen)
        for places in combinations(range(base + now), now)
    ]
    place = critical_place(base, now, error)
    assert sum(count < place for count in inversions) <= error * len(inversions)
    assert sum(count < place + 1 for count in inversions) > error * len(inversions)


@given(base=samples, now=samples, error=st.sampled_from([0.05, 0.025, 0.00125]))
@settings(deadline=None)
def test_bounds_agree_with_the_exact_test_of_scipy(base: list[int], now: list[int], error: float) -> None:
    """What lies below the lower bound is refused by scipy's one-sided test, and what lies above is not."""
    mannwhitneyu = pytest.importorskip("scipy.stats").mannwhitneyu
    found = shift(base, now, error)
    if found.low == -math.inf:
        nothing_shared = mannwhitneyu([v + 10_000 for v in now], base, alternative="greater", method="exact")
        assert nothing_shared.pvalue > error
        return
    for offset, refused in ((-0.5, True), (0.5, False)):
        moved = [value - found.low - offset for value in now]
        p_value = mannwhitneyu(moved, base, alternative="greater", method="exact").pvalue
        assert (p_value <= error) == refused


@given(base=samples, now=samples)
def test_swapping_the_samples_mirrors_the_shift(base: list[int], now: list[int]) -> None:
    one, other = shift(base, now, 0.05), shift(now, base, 0.05)
    assert other == Shift(-one.middle, -one.high, -one.low)


@given(base=samples, now=samples, by=st.integers(-50, 50))
def test_moving_a_sample_moves_the_shift_and_its_bounds(base: list[int], now: list[int], by: int) -> None:
    still, moved = shift(base, now, 0.05), shift(base, [value + by for value in now], 0.05)
    assert moved == Shift(still.middle + by, still.low + by, still.high + by)


def test_lower_bound_is_wrong_no_more_often_than_it_says() -> None:
    rng = random.Random(7)
    wrong = 0
    for _ in range(2000):
        base, now = ([rng.lognormvariate(0, 0.2) for _ in range(count)] for count in (25, 5))
        wrong += shift(base, now, 0.05).low > 0
    assert wrong / 2000 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


def test_five_rounds_against_one_session_of_five_can_decide_up_to_six_comparisons() -> None:
    assert critical_place(5, 5, 0.025 / 6) == 1
    assert critical_place(5, 5, 0.025 / 7) == 0
    assert sessions_needed(5, 5, 0.025 / 7) == 2


def test_three_rounds_against_three_reach_five_percent_and_never_less() -> None:
    assert critical_place(3, 3, 0.05) == 1
    assert critical_place(3, 3, 0.049) == 0


def test_approximation_for_large_samples_is_next_to_the_exact_place(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = critical_place(60, 40, 0.025)
    monkeypatch.setattr("pytest_ckpt.judge.shift._EXACT_UP_TO", 10)
    critical_place.cache_clear()
    assert 0 <= exact - critical_place(60, 40, 0.025) <= 2
    critical_place.cache_clear()
