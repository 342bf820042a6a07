"""Where the time went: disjoint spans that sum to the round, and waiting charged to the rank waited for."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_ckpt.measure.spans import (
    PHASES,
    Event,
    Item,
    RankTrace,
    Span,
    Sync,
    phase_seconds,
    slowest_rank,
    thread_seconds,
    timelines,
)


def trace(
    *,
    start: float = 0.0,
    plan: float = 1.0,
    global_plan: float | None = None,
    write_from: float = 2.0,
    items: list[tuple[float, float, float]] | None = None,
    sync: float = 0.0,
    write_to: float | None = None,
    finish: tuple[float, float] | None = None,
    end: float = 10.0,
) -> RankTrace:
    """A rank's round on one thread; each item is (copy, serialize, write) in seconds."""
    at = write_from
    noted = []
    for copy, serialize, write in items or []:
        noted.append(Item(1, at, at + copy, at + copy + serialize + write, write, 100))
        at += copy + serialize + write
    syncs = [Sync(1, at, at + sync)] if sync else []
    events = [
        Event("local_step", 1, start, start + plan),
        Event("write_data", 1, write_from, write_to if write_to is not None else at + sync),
        Event("save", 1, start, end),
    ]
    if global_plan is not None:
        events.append(Event("global_step", 1, write_from - global_plan, write_from))
    if finish is not None:
        events.append(Event("finish_checkpoint", 1, *finish))
    return RankTrace(called_s=start, returned_s=end, completed_s=end, events=events, items=noted, syncs=syncs)


def test_phases_of_one_rank_are_what_it_did() -> None:
    (path,) = timelines(
        [trace(global_plan=0.5, items=[(0.5, 1.0, 0.5), (0.25, 1.0, 0.75)], sync=2.0, finish=(8.5, 9.5))]
    )
    assert phase_seconds(path) == pytest.approx(
        {
            "plan": 1.5,
            "collective": 0.5 + 0.5 + 0.5,
            "copy": 0.75,
            "serialize": 2.0,
            "write": 1.25,
            "sync": 2.0,
            "metadata": 1.0,
        }
    )


def test_waiting_is_charged_to_the_rank_waited_for() -> None:
    fast = trace(items=[(0.0, 1.0, 0.0)], end=10.0)
    slow = trace(items=[(0.0, 1.0, 0.0)], sync=5.0, finish=(9.0, 9.5), end=10.0)
    waiting, working = timelines([fast, slow])
    waits = [span for span in waiting if span.phase == "wait"]
    assert [span.waits_for for span in waits] == [1, 1]
    assert [span.seconds for span in waits] == pytest.approx([5.0, 0.5])  # its sync, then its metadata
    assert "wait" not in phase_seconds(working)
    assert slowest_rank([waiting, working]) == 1


def test_the_writer_thread_that_finishes_last_is_the_critical_path() -> None:
    items = [Item(1, 2.0, 2.0, 3.0, 0.5, 10), Item(2, 2.0, 2.0, 6.0, 3.0, 10)]
    events = [Event("local_step", 1, 0.0, 1.0), Event("write_data", 1, 2.0, 6.0)]
    traced = RankTrace(called_s=0.0, returned_s=7.0, completed_s=7.0, events=events, items=items, syncs=[])
    (path,) = timelines([traced])
    assert phase_seconds(path)["write"] == pytest.approx(3.0)
    assert thread_seconds(traced) == pytest.approx({"serialize": 1.5, "write": 3.5})


def test_async_staging_comes_before_the_upload() -> None:
    events = [
        Event("_stateful_to_state_dict", 1, 0.0, 0.5),
        Event("stage_state_dict", 1, 0.5, 2.0),
        Event("local_step", 2, 2.0, 3.0),
        Event("write_data", 2, 4.0, 8.0),
    ]
    items = [Item(2, 4.0, 5.0, 8.0, 2.0, 10)]
    traced = RankTrace(called_s=0.0, returned_s=2.1, completed_s=9.0, events=events, items=items, syncs=[])
    (path,) = timelines([traced])
    assert phase_seconds(path)["stage"] == pytest.approx(1.5)
    assert phase_seconds(path)["copy"] == pytest.approx(1.0)


def test_what_nothing_accounts_for_is_other() -> None:
    traced = RankTrace(called_s=1.0, returned_s=4.0, completed_s=4.0, events=[], items=[], syncs=[])
    (path,) = timelines([traced])
    assert path == [Span("other", 1.0, 4.0)]


times = st.floats(min_value=0, max_value=100)
events = st.builds(
    lambda name, thread, start, length: Event(name, thread, start, start + length),
    st.sampled_from(
        ["local_step", "global_step", "write_data", "finish_checkpoint", "stage_state_dict", "save", "unknown"]
    ),
    st.integers(1, 3),
    times,
    times,
)
items = st.builds(
    lambda thread, start, copy, rest, share: Item(thread, start, start + copy, start + copy + rest, rest * share, 100),
    st.integers(1, 3),
    times,
    times,
    times,
    st.floats(min_value=0, max_value=1.5),
)
syncs = st.builds(lambda thread, start, length: Sync(thread, start, start + length), st.integers(1, 3), times, times)
traces = st.builds(
    lambda start, length, events, items, syncs: RankTrace(
        called_s=start,
        returned_s=start + length / 2,
        completed_s=start + length,
        events=events,
        items=items,
        syncs=syncs,
    ),
    times,
    st.floats(min_value=0.001, max_value=100),
    st.lists(events, max_size=8),
    st.lists(items, max_size=8),
    st.lists(syncs, max_size=3),
)


@given(st.lists(traces, min_size=1, max_size=4))
def test_spans_of_a_rank_are_disjoint_in_order_and_sum_to_the_round(ranks: list[RankTrace]) -> None:
    """Whatever the logs say, also where they are wrong or torn."""
    start, end = min(t.called_s for t in ranks), max(t.completed_s for t in ranks)
    for path in timelines(ranks):
        assert path[0].start_s == start
        assert path[-1].end_s == end
        assert all(first.end_s == second.start_s for first, second in pairwise(path))
        assert all(span.end_s > span.start_s for span in path)
        assert {span.phase for span in path} <= set(PHASES)
        assert all((span.waits_for is not None) == (span.phase == "wait") for span in path)
        assert sum(phase_seconds(path).values()) == pytest.approx(end - start)


def load_trace(*, plan: float, read: tuple[float, float], restored: tuple[float, float], end: float) -> RankTrace:
    events = [
        Event("_stateful_to_state_dict", 1, 0.0, 0.5),
        Event("local_step", 1, 0.5, plan),
        Event("read_data", 1, *read),
        Event("load_state_dict", 1, *restored),
    ]
    return RankTrace(called_s=0.0, returned_s=end, completed_s=end, events=events, items=[], syncs=[])


def test_phases_of_a_load_are_reading_and_what_surrounds_it() -> None:
    first, last = timelines(
        [
            load_trace(plan=1.0, read=(2.5, 5.0), restored=(7.25, 8.0), end=8.0),
            load_trace(plan=2.0, read=(2.5, 7.0), restored=(7.25, 8.5), end=9.0),
        ]
    )
    assert phase_seconds(first) == pytest.approx(
        {"state_dict": 1.25, "plan": 0.5, "collective": 0.75, "wait": 3.0, "read": 2.5, "other": 1.0}
    )
    assert phase_seconds(last) == pytest.approx(
        {"state_dict": 1.75, "plan": 1.5, "collective": 0.75, "read": 4.5, "other": 0.5}
    )
    assert slowest_rank([first, last]) == 1
