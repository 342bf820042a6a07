from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_ckpt.judge.statistics import chance_of_rise


def rises(values: tuple[float, ...]) -> int:
    return sum(b > a for i, a in enumerate(values) for b in values[i + 1 :])


@pytest.mark.parametrize("order", [(1, 2, 3, 4, 5), (5, 4, 3, 2, 1), (2, 1, 3, 5, 4), (1, 2, 4, 3, 5)])
def test_chance_is_the_share_of_orders_that_rise_as_steadily(order: tuple[float, ...]) -> None:
    orders = list(permutations(range(5)))
    expected = sum(rises(other) >= rises(order) for other in orders) / len(orders)
    assert chance_of_rise(order) == pytest.approx(expected)


def test_many_values_are_judged_much_as_few() -> None:
    few, many = ([float(i % 7 + i / 4) for i in range(count)] for count in (20, 21))
    assert chance_of_rise(many) == pytest.approx(chance_of_rise(few), rel=0.5)
    assert chance_of_rise([1.0] * 15 + [2.0] * 15) < 0.001


@given(st.lists(st.floats(allow_nan=False), max_size=30))
def test_chance_is_one_of_none_or_equal_values_and_never_outside_0_and_1(values: list[float]) -> None:
    assert 0 <= chance_of_rise(values) <= 1
    assert chance_of_rise([7.0] * len(values)) >= 0.5
