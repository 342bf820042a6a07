"""Records: what a round comes to from its ranks' clock readings, and that records survive the result file."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_ckpt.records import (
    FORMAT,
    METHOD,
    Environment,
    Round,
    SaveRecord,
    Scenario,
    TargetRecord,
    from_plain,
    summarize_round,
    to_plain,
)

durations = st.floats(min_value=1e-3, max_value=1e4)
peaks = st.none() | st.integers(0, 2**40)


@st.composite
def readings(draw: st.DrawFn) -> list[tuple[float, float, float, int | None]]:
    """A rank's call, return and completion, in this order, and its peak."""
    start = draw(st.floats(min_value=0, max_value=1e6))
    ranks = []
    for _ in range(draw(st.integers(1, 8))):
        called = start + draw(st.floats(min_value=0, max_value=1))
        returned = called + draw(durations)
        ranks.append((called, returned, returned + draw(st.just(0.0) | durations), draw(peaks)))
    return ranks


def summarize(ranks: list[tuple[float, float, float, int | None]], blocks: bool, logical_bytes: int = 10**9) -> Round:
    called, returned, completed, peak = (list(column) for column in zip(*ranks, strict=True))
    return summarize_round(called, returned, completed, peak, logical_bytes=logical_bytes, blocks_until_complete=blocks)


@given(ranks=readings())
def test_save_lasts_from_the_first_call_to_the_last_completion(ranks: Any) -> None:
    made = summarize(ranks, blocks=True)
    assert made.save_s == max(r[2] for r in ranks) - min(r[0] for r in ranks)
    assert made.save_s == max(rank.save_s for rank in made.ranks) == made.ranks[made.straggler].save_s
    assert made.throughput_Bps * made.save_s == pytest.approx(10**9)


@given(ranks=readings())
def test_stall_is_the_whole_save_where_it_blocks_and_else_the_longest_call(ranks: Any) -> None:
    assert summarize(ranks, blocks=True).stall_s == summarize(ranks, blocks=True).save_s
    made = summarize(ranks, blocks=False)
    assert made.stall_s == max(rank.stall_s for rank in made.ranks) == max(r[1] - r[0] for r in ranks)
    assert made.stall_s <= made.save_s


@given(ranks=readings(), shift_s=st.floats(min_value=0, max_value=1e6))
def test_only_differences_of_readings_count(ranks: Any, shift_s: float) -> None:
    shifted = [(c + shift_s, r + shift_s, d + shift_s, peak) for c, r, d, peak in ranks]
    assert summarize(shifted, blocks=False).save_s == pytest.approx(summarize(ranks, blocks=False).save_s, abs=1e-6)
    assert summarize(shifted, blocks=False).stall_s == pytest.approx(summarize(ranks, blocks=False).stall_s, abs=1e-6)


@given(ranks=readings())
def test_peak_of_the_round_is_the_sum_over_ranks_and_unknown_where_one_is_unknown(ranks: Any) -> None:
    known = [r[3] for r in ranks]
    made = summarize(ranks, blocks=True)
    assert made.peak_rss_bytes == (None if None in known else sum(known))
    assert [rank.peak_rss_bytes for rank in made.ranks] == known


def test_readings_of_different_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(ValueError):
        summarize_round([1, 1], [2], [3, 3], [0, 0], logical_bytes=1, blocks_until_complete=True)


def record(rounds: list[Round]) -> SaveRecord:
    return SaveRecord(
        scenario=Scenario(
            engine="dcp",
            mode="sync",
            writer="FileSystemWriter",
            options={"threads": 2},
            model="llama3-debug",
            state="fp32-adamw",
            params=None,
            world_size=2,
            mesh="shard=2",
            device="cpu",
        ),
        environment=Environment(torch="2.13", driver=None, kernel="6", plugin="0", python="3.11"),
        host="here",
        time="2026-01-01T00:00:00+00:00",
        target=TargetRecord(label="local", kind="path", medium="storage", mount="/", filesystem="ext4"),
        logical_bytes=10**9,
        stored_bytes=None,
        folder_bytes=10**9,
        rounds=rounds,
        first_save_s=1.5,
    )


@given(rounds=st.lists(readings(), min_size=1, max_size=5))
def test_record_survives_the_result_file(rounds: Any) -> None:
    made = record([summarize(ranks, blocks=False) for ranks in rounds])
    assert from_plain(json.loads(json.dumps(to_plain(made)))) == made


def test_record_carries_the_numbers_of_its_format_and_method_and_is_immutable() -> None:
    made = record([summarize([(0.0, 1.0, 2.0, 5), (0.5, 1.0, 3.0, 6)], blocks=False)])
    plain = to_plain(made)
    assert (plain["format"], plain["method"]) == (FORMAT, METHOD)
    assert (made.save_s, made.stall_s) == (3.0, 1.0)
    with pytest.raises(AttributeError):
        made.host = "there"  # type: ignore[misc]


@pytest.mark.parametrize("plain", [None, [], {}, {"scenario": {}}])
def test_what_is_no_record_is_refused(plain: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        from_plain(plain)
