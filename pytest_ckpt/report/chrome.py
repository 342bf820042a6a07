"""All ranks' spans in Chrome's trace event format, to be opened in Perfetto (ui.perfetto.dev)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TimedSpan = tuple[str, float, float]


def trace_events(
    scenario: str, process: int, rounds: Sequence[Mapping[int, Sequence[TimedSpan]]]
) -> list[dict[str, Any]]:
    """Return the events of one scenario: `rounds` holds, for each round, each rank's (phase, start, end) in seconds.

    A scenario is a process of the picture, numbered `process`, and a rank a thread; times are CLOCK_MONOTONIC, in
    microseconds as the format wants them.
    """
    events: list[dict[str, Any]] = [_name("process_name", process, 0, scenario)]
    events += [
        _name("thread_name", process, rank, f"rank {rank}") for rank in sorted({r for one in rounds for r in one})
    ]
    for number, ranks in enumerate(rounds, 1):
        for rank, spans in ranks.items():
            events += [
                {
                    "name": phase,
                    "cat": "ckpt",
                    "ph": "X",
                    "ts": start_s * 1e6,
                    "dur": (end_s - start_s) * 1e6,
                    "pid": process,
                    "tid": rank,
                    "args": {"round": number},
                }
                for phase, start_s, end_s in spans
            ]
    return events


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
