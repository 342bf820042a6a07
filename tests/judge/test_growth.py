"""Exponents of what grows: exact on powers, honest about noise, and of like with like."""

from __future__ import annotations

import msgspec
import pytest

from pytest_ckpt.judge.growth import STEEPEST, alike, fit, growth_of
from pytest_ckpt.records import SaveRecord

from .made import one_round, record

SIZES = (8, 32, 128, 512)


def planned(ranks: int, **seconds: float) -> SaveRecord:
    """Return a record of planning, whose rounds differ by a tenth from each other, the fastest as said."""
    rounds = [one_round({step: s * slower for step, s in seconds.items()}) for slower in (1.2, 1.0, 1.1)]
    made = record(mode="plan", rounds=rounds)
    scenario = msgspec.structs.replace(made.scenario, world_size=ranks, mesh=f"shard={ranks}")
    return msgspec.structs.replace(made, scenario=scenario)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.5, 2.0])
def test_exponent_of_a_power_is_exact_and_its_interval_is_a_point(exponent: float) -> None:
    grown = fit("step", {size: 0.01 * size**exponent for size in SIZES})
    assert (grown.exponent, grown.low, grown.high) == pytest.approx((exponent, exponent, exponent), abs=1e-6)
    assert grown.is_too_steep == (exponent > STEEPEST)


def test_interval_holds_what_scipy_says() -> None:
    stats = pytest.importorskip("scipy.stats")
    np = pytest.importorskip("numpy")
    seconds = {8: 0.1, 32: 0.5, 128: 1.4, 512: 7.9, 2048: 30.0}
    grown = fit("step", seconds)
    line = stats.linregress(np.log(list(seconds)), np.log(list(seconds.values())))
    half = stats.t.ppf(0.975, len(seconds) - 2) * line.stderr
    assert (grown.exponent, grown.low, grown.high) == pytest.approx(
        (line.slope, line.slope - half, line.slope + half), rel=1e-3
    )


def test_fastest_round_of_each_size_counts_and_the_steepest_step_comes_first() -> None:
    growth = growth_of([planned(size, gather=0.001 * size, check=1e-5 * size**2, fixed=0.02) for size in SIZES])
    assert growth is not None
    assert [step.step for step in growth.steps] == ["check", "gather", "fixed"]
    assert growth.is_too_steep
    assert growth.steepest.exponent == pytest.approx(2)
    assert growth.steps[1].seconds == pytest.approx({size: 0.001 * size for size in SIZES})
    assert [step.word for step in growth.steps] == ["grows quadratically", "grows linearly", "hardly grows"]
    assert "check grows quadratically: exponent 2.00 (2.00 .. 2.00), 0.64 ms at 8 ranks, 2.62 s at 512" in str(growth)


def test_what_is_known_of_dcp_is_said_and_is_not_too_steep_unless_it_is_worse_than_known() -> None:
    known = growth_of([planned(size, gather=0.001 * size, validate=1e-5 * size**1.9) for size in SIZES])
    assert known is not None
    assert not known.is_too_steep
    assert len(known.known) == 1
    assert known.known[0].startswith("validate is known to be quadratic")
    worse = growth_of([planned(size, validate=1e-6 * size**2.5) for size in SIZES])
    other = growth_of([planned(size, gather=1e-5 * size**1.9) for size in SIZES])
    for growth in (worse, other):
        assert growth is not None
        assert growth.is_too_steep
        assert growth.known == []


def test_step_that_takes_next_to_nothing_is_not_judged() -> None:
    growth = growth_of([planned(size, gather=0.001 * size, tiny=1e-8 * size**2) for size in SIZES])
    assert growth is not None
    assert [step.step for step in growth.steps] == ["gather"]
    assert not growth.is_too_steep


def test_three_sizes_tell_nothing() -> None:
    assert growth_of([planned(size, gather=0.001 * size) for size in SIZES[:3]]) is None


def test_groups_differ_in_nothing_but_ranks() -> None:
    plain = [planned(size, gather=0.001) for size in (32, 8)]
    cached = [
        msgspec.structs.replace(
            made, scenario=msgspec.structs.replace(made.scenario, options={"enable_plan_caching": True})
        )
        for made in plain
    ]
    groups = alike([plain[0], cached[0], plain[1], cached[1]])
    assert [[made.scenario.world_size for made in group] for group in groups] == [[8, 32], [8, 32]]
    assert [bool(group[0].scenario.options) for group in groups] == [False, True]
