"""The verdict on a scenario: what it says of made-up nights, and what it never says."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_ckpt.judge.baseline import Session
from pytest_ckpt.judge.bounds import SaveFacts, find_bounds
from pytest_ckpt.judge.verdict import Rule, comparisons_of, is_undecided, judge, wants_second_look
from pytest_ckpt.records import OUTCOMES, Environment, SaveRecord, Verdict

from .made import BYTES, PROBES, one_round, record

STEADY = [1.00, 1.01, 0.99, 1.02, 0.98]


def saved(
    seconds: list[float],
    *,
    stalls: list[float] | None = None,
    storage: float = 1.0,
    phase: str = "write",
    **fields: Any,
) -> SaveRecord:
    """Return a record of rounds that took `seconds`; the storage's probes are `storage` times the usual."""
    probes = msgspec.structs.replace(
        PROBES,
        write_direct_Bps=(PROBES.write_direct_Bps or 0) * storage,
        write_synced_Bps=(PROBES.write_synced_Bps or 0) * storage,
    )
    rounds = [
        one_round({"plan": 0.1, phase: s - 0.1}, stall_s=stalls[i] if stalls else None) for i, s in enumerate(seconds)
    ]
    bounds = find_bounds(BYTES, probes, SaveFacts(synced=True, copy="none"))
    return record(rounds=rounds, probes=probes, **{"bounds": bounds, **fields})


def sessions(*nights: list[float], hosts: str = "a", **fields: Any) -> list[Session]:
    return [
        Session(
            source=f"{number:04}_x.json",
            session=str(number),
            time=f"2026-01-{number:02}",
            host=hosts[(number - 1) % len(hosts)],
            records=[saved(night, **fields)],
        )
        for number, night in enumerate(nights, 1)
    ]


def scaled(factor: float) -> list[float]:
    return [factor * s for s in STEADY]


FIVE = sessions(*[STEADY] * 5)


def outcome(verdicts: list[Verdict], metric: str = "throughput") -> str:
    return next(v.outcome for v in verdicts if v.metric == metric)


def of(verdicts: list[Verdict], metric: str = "throughput") -> Verdict:
    return next(v for v in verdicts if v.metric == metric)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (STEADY, "ok"),
        (scaled(1.25), "regressed"),
        (scaled(0.5), "improved"),
        ([0.8, 1.3, 1.0, 1.2, 0.9], "undecided"),
        (scaled(1.05), "ok"),
    ],
)
def test_outcome_is_told_by_where_the_bounds_lie(now: list[float], expected: str) -> None:
    verdict = of(judge(saved(now), FIVE, Rule()))
    assert verdict.outcome == expected
    assert verdict.text.startswith(f"throughput {expected}: ")


def test_regressed_says_by_how_much_how_sure_and_against_what() -> None:
    verdict = of(judge(saved(scaled(2)), FIVE, Rule()))
    assert verdict.change == pytest.approx(-0.5)
    assert verdict.now == pytest.approx(BYTES / 2)
    assert verdict.baseline == pytest.approx(BYTES)
    low, high = verdict.interval or (None, None)
    assert low is not None
    assert high is not None
    assert low < -0.5 < high < -0.45
    assert verdict.source == ", ".join(session.source for session in FIVE)
    assert "150 MB/s, baseline 300 MB/s: -50 %" in verdict.text


def test_margin_is_a_share_of_throughput() -> None:
    exact = sessions(*[[1.0] * 5] * 5)
    assert outcome(judge(saved([1 / 0.905] * 5), exact, Rule(tolerance=0.1))) == "ok"
    assert outcome(judge(saved([1 / 0.895] * 5), exact, Rule(tolerance=0.1))) == "regressed"
    assert outcome(judge(saved([1 / 0.895] * 5), exact, Rule(tolerance=0.2))) == "ok"


def test_fewer_than_four_rounds_are_not_judged() -> None:
    verdicts = judge(saved([5.0] * 3), FIVE, Rule())
    assert outcome(verdicts) == "undecided"
    assert "3 rounds, and fewer than 4 are not judged" in of(verdicts).text
    assert not wants_second_look(saved([5.0] * 3), verdicts)


def test_second_look_is_wanted_once() -> None:
    noisy = saved([0.8, 1.3, 1.0, 1.2, 0.9])
    assert wants_second_look(noisy, judge(noisy, FIVE, Rule()))
    assert not wants_second_look(noisy, judge(noisy, FIVE, Rule(), looks=2))


def test_one_session_is_said_to_be_one() -> None:
    verdict = of(judge(saved(STEADY), FIVE[:1], Rule()))
    assert "1 session, how sessions differ is not known" in verdict.text


def test_what_many_comparisons_cannot_reach_says_how_many_sessions_would() -> None:
    verdict = of(judge(saved(scaled(10)), FIVE[:1], Rule(comparisons=7)))
    assert verdict.outcome == "undecided"
    assert verdict.detectable is None
    assert verdict.interval == [None, None]
    assert "2 sessions of 5 rounds would" in verdict.text
    assert outcome(judge(saved(scaled(10)), FIVE[:1], Rule(comparisons=6))) == "regressed"


def test_smallest_detectable_slowdown_is_what_turns_red() -> None:
    rng = random.Random(3)
    nights = [[rng.lognormvariate(0, 0.05) for _ in range(5)] for _ in range(5)]
    now = [rng.lognormvariate(0, 0.05) for _ in range(5)]
    first = of(judge(saved(now), sessions(*nights), Rule()))
    assert first.detectable is not None
    assert first.change is not None
    # Bring the estimate to zero first, then slow every round down by a little more, and a little less, than that.
    level = [s * (1 + first.change) for s in now]
    for more, expected in ((0.01, "regressed"), (-0.01, "undecided")):
        slower = [s / (1 + first.detectable - more) for s in level]
        assert outcome(judge(saved(slower), sessions(*nights), Rule())) == expected


def test_improved_mirrors_regressed_and_calls_the_baseline_stale() -> None:
    verdict = of(judge(saved(scaled(0.29)), FIVE, Rule()))
    assert verdict.outcome == "improved"
    assert "stale by a factor of three or more" in verdict.text
    assert "--ckpt-baseline=save" in verdict.text


def test_creep_of_three_percent_a_session_is_caught_against_the_first_sessions() -> None:
    nights = [scaled(1.03**night) for night in range(10)]
    against_last = judge(saved(scaled(1.03**10)), sessions(*nights[5:]), Rule())
    assert outcome(against_last) != "regressed"
    verdict = of(judge(saved(scaled(1.03**10)), sessions(*nights), Rule()))
    assert verdict.outcome == "regressed"
    assert "against the first sessions" in verdict.text
    assert verdict.source is not None
    assert verdict.source.startswith("0001_x.json")


def test_only_the_last_five_sessions_are_the_recent_ones() -> None:
    nights = sessions(*[scaled(2.0)] * 5, *[STEADY] * 5)
    assert outcome(judge(saved(scaled(1.6)), nights, Rule())) == "regressed"


def test_no_session_is_no_baseline() -> None:
    (verdict,) = judge(saved(STEADY), [], Rule())
    assert verdict.outcome == "no baseline"
    assert verdict.now is None


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [("method", 99, "method"), ("tracing", "off", "tracing"), ("start_method", "fork", "start method")],
)
def test_other_way_of_measuring_is_not_comparable_and_named(field: str, value: Any, named: str) -> None:
    (verdict,) = judge(saved(scaled(10), **{field: value}), FIVE, Rule())
    assert verdict.outcome == "not comparable"
    assert named in verdict.text


def test_other_size_of_state_is_not_comparable() -> None:
    (verdict,) = judge(saved(STEADY, logical_bytes=2 * BYTES), FIVE, Rule())
    assert verdict.outcome == "not comparable"
    assert "600 MB now, 300 MB in the baseline" in verdict.text


def test_release_of_the_plugin_alone_discards_nothing_and_is_named_with_a_regression() -> None:
    new = Environment(torch="2", driver=None, kernel="6", plugin="1", python="3")
    verdict = of(judge(saved(scaled(2), environment=new), FIVE, Rule()))
    assert verdict.outcome == "regressed"
    assert "plugin 1 (was 0)" in (verdict.attribution or "")


def test_probe_that_fell_alike_makes_it_the_storage() -> None:
    verdict = of(judge(saved(scaled(2.2), storage=0.5), FIVE, Rule()))
    assert (verdict.attribution or "").startswith("storage slower: 134 MB/s by its probe, 267 MB/s before")


def test_probe_that_held_makes_it_the_software_and_names_the_phase() -> None:
    verdict = of(judge(saved(scaled(2), phase="serialize"), FIVE, Rule()))
    assert (verdict.attribution or "").startswith("software slower: the probe held (267 MB/s by its probe")
    assert "phase serialize grew most" in (verdict.attribution or "")


def test_without_probes_nobody_is_blamed() -> None:
    verdict = of(judge(saved(scaled(2), bounds=None), FIVE, Rule()))
    assert verdict.outcome == "regressed"
    assert "no probes" in (verdict.attribution or "")


def test_efficiency_tells_what_a_slower_storage_explains() -> None:
    five = sessions(*[[1.2 * s for s in STEADY]] * 5)
    slow_storage = judge(saved([2.4 * s for s in STEADY], storage=0.5), five, Rule())
    assert outcome(slow_storage) == "regressed"
    assert outcome(slow_storage, "efficiency") == "ok"
    slow_software = judge(saved([2.4 * s for s in STEADY]), five, Rule())
    assert outcome(slow_software, "efficiency") == "regressed"


def test_efficiency_follows_no_single_odd_probe() -> None:
    """Its probe is taken once a session: where sessions' probes differ by a fifth, a fifth is nothing."""
    nights = [sessions(STEADY, storage=factor)[0] for factor in (1.0, 1.2, 0.9, 1.1, 1.0)]
    assert outcome(judge(saved(STEADY, storage=1.3), nights, Rule()), "efficiency") != "regressed"
    assert outcome(judge(saved(STEADY, storage=3), nights, Rule()), "efficiency") == "regressed"
    verdicts = judge(saved(STEADY, storage=3), nights[:2], Rule())
    assert outcome(verdicts, "efficiency") == "undecided"
    assert not is_undecided(verdicts)


def test_stall_is_judged_of_async_saves_alone() -> None:
    stored = sessions(*[STEADY] * 5, mode="async", stalls=[0.1] * 5)
    verdicts = judge(saved(STEADY, mode="async", stalls=[0.2] * 5), stored, Rule())
    assert outcome(verdicts) == "ok"
    stall = of(verdicts, "stall")
    assert stall.outcome == "regressed"
    assert stall.change == pytest.approx(1.0)
    assert [v.metric for v in judge(saved(STEADY), FIVE, Rule())] == ["throughput", "efficiency"]


def test_stall_of_a_few_milliseconds_more_wakes_nobody() -> None:
    stored = sessions(*[STEADY] * 5, mode="async", stalls=[0.002] * 5)
    verdicts = judge(saved(STEADY, mode="async", stalls=[0.006] * 5), stored, Rule())
    assert outcome(verdicts, "stall") == "ok"


def test_fewer_than_three_hosts_of_a_fleet_are_said() -> None:
    on_two = sessions(*[STEADY] * 5, hosts="ab")
    assert "on 2 hosts, fewer than 3" in of(judge(saved(STEADY), on_two, Rule(host="a"))).text
    swapped = of(judge(saved(STEADY), FIVE, Rule(host="z"))).text
    assert "measured on 1 other host, fewer than 3, so how hosts differ is not known" in swapped
    on_three = sessions(*[STEADY] * 5, hosts="abc")
    assert "fewer than 3" not in of(judge(saved(STEADY), on_three, Rule(host="b"))).text
    assert "host" not in of(judge(saved(STEADY), FIVE, Rule(host="a"))).text


def test_comparisons_are_counted_of_what_is_stored() -> None:
    assert comparisons_of("sync", FIVE) == 2
    assert comparisons_of("sync", sessions(*[STEADY] * 6)) == 4
    assert comparisons_of("async", sessions(*[STEADY] * 2, mode="async")) == 2
    assert comparisons_of("sync", sessions(STEADY, bounds=None)) == 1
    assert comparisons_of("sync", []) == 0


@given(
    now=st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=12),
    nights=st.lists(st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=6), min_size=0, max_size=7),
    tolerance=st.floats(0.01, 0.9),
    comparisons=st.integers(1, 200),
)
@settings(deadline=None, max_examples=60)
def test_any_night_gets_a_verdict_in_words(
    now: list[float], nights: list[list[float]], tolerance: float, comparisons: int
) -> None:
    found = judge(saved(now), sessions(*nights), Rule(tolerance=tolerance, comparisons=comparisons))
    assert found
    for verdict in found:
        assert verdict.outcome in OUTCOMES
        assert verdict.text
        assert "nan" not in verdict.text
        assert (verdict.attribution is not None) == (verdict.outcome == "regressed")
        if verdict.change is not None and verdict.interval and verdict.interval[0] is not None:
            assert verdict.interval[0] <= verdict.change <= (verdict.interval[1] or math.inf)


@given(now=st.lists(st.floats(0.9, 1.1), min_size=4, max_size=8), factor=st.floats(1.0, 3.0))
@settings(deadline=None, max_examples=60)
def test_slower_rounds_never_turn_red_into_green(now: list[float], factor: float) -> None:
    order = {"improved": 0, "ok": 1, "undecided": 2, "regressed": 3}
    before, after = (outcome(judge(saved([f * s for s in now]), FIVE, Rule())) for f in (1.0, factor))
    assert before == after or order[after] >= min(order[before], 1)
    assert not (before == "regressed" and after != "regressed")


@pytest.mark.parametrize(
    ("mode", "metrics"),
    [
        ("sync", ["throughput", "efficiency"]),
        ("async", ["throughput", "stall"]),
        ("async-pinned", ["throughput", "stall"]),
        ("load-warm", ["throughput"]),
        ("load-cold", ["throughput"]),
    ],
)
def test_what_is_judged_depends_on_the_mode(mode: str, metrics: list[str]) -> None:
    held = record(mode=mode).scenario
    nights = sessions(*[STEADY] * 3, stalls=[0.1] * 5, scenario=held)
    now = saved(STEADY, stalls=[0.1] * 5, scenario=held)
    assert [v.metric for v in judge(now, nights, Rule())] == metrics


def test_slower_load_is_regressed_and_its_phase_named() -> None:
    held = record(mode="load-warm").scenario
    nights = sessions(*[STEADY] * 3, phase="read", scenario=held)
    (verdict,) = judge(saved(scaled(1.5), phase="read", scenario=held), nights, Rule())
    assert verdict.outcome == "regressed"
    assert "phase read grew most" in str(verdict.attribution)
