from __future__ import annotations

import json

from pytest_ckpt.report.chrome import trace_events


def test_scenario_is_a_process_and_a_rank_a_thread_with_times_in_microseconds() -> None:
    rounds = [{0: [("plan", 1.0, 1.5), ("write", 1.5, 2.0)], 1: [("write", 1.0, 2.0)]}, {0: [("plan", 3.0, 3.25)]}]
    events = trace_events("save", 7, rounds)
    names = [(e["name"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names == [("process_name", 0, "save"), ("thread_name", 0, "rank 0"), ("thread_name", 1, "rank 1")]
    spans = [(e["name"], e["tid"], e["ts"], e["dur"], e["args"]["round"]) for e in events if e["ph"] == "X"]
    assert spans == [
        ("plan", 0, 1e6, 5e5, 1),
        ("write", 0, 1.5e6, 5e5, 1),
        ("write", 1, 1e6, 1e6, 1),
        ("plan", 0, 3e6, 2.5e5, 2),
    ]
    assert {event["pid"] for event in events} == {7}
    assert json.loads(json.dumps(events)) == events


def test_scenario_without_spans_has_its_name_alone() -> None:
    assert [event["name"] for event in trace_events("save", 1, [{}])] == ["process_name"]
