"""The simulation reproduces the published table of the rules, and shows what the one that is built can do."""

from __future__ import annotations

import math

import pytest

from .simulation import FALLEN, RULES, STORAGE, VM, Noise, share, two_looks, with_normal_bounds

SLOWER = -math.log(FALLEN)
RUNS = 3000

TABLE = {
    # Percentage that fails when nothing changed, and when throughput fell by a fifth; from the project's design.
    "mean > 10 % over the last session": ((14, 89), (29, 74)),
    "median > 10 % over the pool": ((3, 99), (25, 78)),
    "Mann-Whitney p < 0.05": ((11, 100), (10, 57)),
    "Hodges-Lehmann, lower bound > 10 %": ((0, 86), (2, 28)),
    "the same, three outcomes, two looks": ((0, 96), (1, 32)),
}
UNDECIDED = (4, 68)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize(("column", "noise"), [(0, STORAGE), (1, VM)], ids=["storage", "vm"])
def test_rule_fails_as_often_as_in_the_table(name: str, column: int, noise: Noise) -> None:
    """The table was made with normally approximated bounds, which lie one place further out than the exact ones."""
    rule = with_normal_bounds(RULES[name])
    unchanged, fallen = TABLE[name][column]
    assert share(rule, noise, 0.0, RUNS) == pytest.approx(unchanged, abs=3)
    assert share(rule, noise, SLOWER, RUNS) == pytest.approx(fallen, abs=3)


@pytest.mark.parametrize(("noise", "expected"), list(zip((STORAGE, VM), UNDECIDED, strict=True)), ids=["storage", "vm"])
def test_what_two_looks_leave_undecided_is_that_of_the_table(noise: Noise, expected: float) -> None:
    rule = with_normal_bounds(two_looks)
    assert share(rule, noise, SLOWER, RUNS, "undecided") == pytest.approx(expected, abs=3)


@pytest.mark.parametrize("noise", [STORAGE, VM], ids=["storage", "vm"])
def test_exact_bounds_fail_no_more_often_when_nothing_changed_and_show_no_less(noise: Noise) -> None:
    assert share(two_looks, noise, 0.0, RUNS) <= 2.5
    exact, approximate = (
        share(two_looks, noise, SLOWER, RUNS),
        share(with_normal_bounds(two_looks), noise, SLOWER, RUNS),
    )
    assert 0 <= exact - approximate < 4


def test_night_of_twenty_comparisons_raises_no_false_alarm_on_a_noisy_machine_and_still_shows_a_halving() -> None:
    def twenty(night: object) -> str:
        return two_looks(night, 20)  # type: ignore[arg-type]

    assert share(twenty, VM, 0.0, RUNS) <= 0.3
    assert share(twenty, STORAGE, SLOWER, RUNS) > 60
    assert share(twenty, VM, math.log(2), 1000) > 90


def test_slowdown_by_half_fails_nineteen_of_twenty_sessions_on_calm_storage() -> None:
    calm = Noise(0.10, 0.05)
    assert share(two_looks, calm, math.log(1.5), RUNS) > 95
    assert share(two_looks, calm, 0.0, RUNS) < 5
