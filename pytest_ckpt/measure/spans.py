"""Where a round's time went: spans on each rank's critical path, and waiting charged to the rank waited for.

Pure functions on plain readings. All times are CLOCK_MONOTONIC seconds of one host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

PHASES = (
    "state_dict",
    "plan",
    "collective",
    "wait",
    "copy",
    "serialize",
    "write",
    "sync",
    "metadata",
    "stage",
    "earlier",
    "read",
    "other",
)
"""The phases of a rank's round, disjoint; `other` is what nothing else accounts for."""

_EVENT_PHASES = {
    "_stateful_to_state_dict": "state_dict",
    "local_step": "plan",
    "global_step": "plan",
    "finish_checkpoint": "metadata",
    "stage_state_dict": "stage",
    "earlier_save": "earlier",
    "maybe_synchronize_staging": "stage",
    "read_data": "read",
    "load_state_dict": "state_dict",
}


class Span(NamedTuple):
    """A stretch of one rank's time in one phase."""

    phase: str
    start_s: float
    end_s: float
    bytes: int = 0
    thread: int = 0
    waits_for: int | None = None
    """For phase `wait`: the rank that this one waited for."""

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


class Event(NamedTuple):
    """Something that DCP did on one thread, by the name of its function."""

    name: str
    thread: int
    start_s: float
    end_s: float


class Item(NamedTuple):
    """One item that a writer put into a file: copied, then serialised and written.

    `write_s` seconds of the stretch from `serialize_s` to `end_s` were spent in the stream's write calls.
    """

    thread: int
    copy_s: float
    serialize_s: float
    end_s: float
    write_s: float
    bytes: int


class Sync(NamedTuple):
    """One file made durable, from the writer's asking for its descriptor to its closing."""

    thread: int
    start_s: float
    end_s: float


class RankTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank noted in one round."""

    called_s: float
    returned_s: float
    completed_s: float
    events: list[Event]
    items: list[Item]
    syncs: list[Sync]
    global_syncs: int = 0
    """Calls of os.sync(), which waits for every file system of the host."""
    tracer_s: float = 0.0
    """Estimated cost of the tracing itself: calls times their measured cost."""
    planned_bytes: int | None = None
    """Bytes of the tensors that the rank's final plan has it write; None where the engine has no such plan."""


def timelines(traces: Sequence[RankTrace]) -> list[list[Span]]:
    """Return each rank's critical path from the first rank's call to the last completion.

    The spans of a rank are disjoint, in order and without gaps.
    """
    start = min(trace.called_s for trace in traces)
    end = max(trace.completed_s for trace in traces)
    marks = [_Marks.of(trace) for trace in traces]
    return [_fill(_path(rank, trace, marks), start, end) for rank, trace in enumerate(traces)]


def phase_seconds(spans: Iterable[Span]) -> dict[str, float]:
    """Return the seconds of each phase that occurs, in the order of `PHASES`."""
    sums: dict[str, float] = {}
    for span in spans:
        sums[span.phase] = sums.get(span.phase, 0.0) + span.seconds
    return {phase: sums[phase] for phase in PHASES if phase in sums}


def thread_seconds(trace: RankTrace) -> dict[str, float]:
    """Return the seconds of copy, serialize, write and sync summed over all writer threads of a rank."""
    return phase_seconds(span for thread in _threads(trace) for span in _writer_spans(trace, thread))


def slowest_rank(spans: Sequence[Sequence[Span]]) -> int:
    """Return the rank that waited least: the one that the others waited for."""
    waits = [phase_seconds(rank).get("wait", 0.0) for rank in spans]
    return waits.index(min(waits))


class _Marks(NamedTuple):
    """The points at which the ranks meet: before and after the collectives of a save, or of a load."""

    planned_s: float | None
    write: tuple[float, float] | None
    """Of a load: its reading."""
    global_plan: tuple[float, float] | None
    finish: tuple[float, float] | None

    @classmethod
    def of(cls, trace: RankTrace) -> _Marks:
        def last(name: str) -> tuple[float, float] | None:
            found = [(e.start_s, e.end_s) for e in trace.events if e.name == name]
            return found[-1] if found else None

        local = last("local_step")
        data = last("write_data") or last("read_data")
        return cls(local[1] if local else None, data, last("global_step"), last("finish_checkpoint"))


def _path(rank: int, trace: RankTrace, marks: list[_Marks]) -> list[Span]:
    own = marks[rank]
    spans = [
        Span(_EVENT_PHASES[event.name], event.start_s, event.end_s, 0, event.thread)
        for event in trace.events
        if event.name in _EVENT_PHASES
    ]
    if own.write is not None:
        spans += _critical_writer(trace, own.write)
        if own.planned_s is not None:
            spans += _meeting(
                rank, own.planned_s, own.write[0], [m.planned_s for m in marks], [m.global_plan for m in marks]
            )
        ended = [m.write[1] if m.write else None for m in marks]
        # After a load's last collective the state takes what was read.
        restored = (e.start_s for e in trace.events if e.name == "load_state_dict" and e.start_s >= own.write[1])
        until_s = min(restored, default=trace.completed_s)
        spans += _meeting(rank, own.write[1], until_s, ended, [m.finish for m in marks])
    return spans


def _meeting(
    rank: int,
    left_s: float,
    until_s: float,
    arrived_s: list[float | None],
    work: list[tuple[float, float] | None],
) -> list[Span]:
    """Return a rank's spans between its own work and the next: wait for the last, its coordinator's work, collectives.

    `arrived_s` holds when each rank came to the meeting, `work` what the coordinator did at it (None elsewhere).
    """
    known = [(at, other) for other, at in enumerate(arrived_s) if at is not None]
    last_s, last = max(known)
    spans = []
    at = left_s
    if last != rank and last_s > at:
        spans.append(Span("wait", at, min(last_s, until_s), waits_for=last))
        at = min(last_s, until_s)
    for coordinator, stretch in enumerate(work):
        if stretch is None:
            continue
        begin, done = max(stretch[0], at), min(stretch[1], until_s)
        if done <= begin:
            continue
        spans.append(Span("collective", at, begin))
        if coordinator != rank:  # its own work is an event of its own
            spans.append(Span("wait", begin, done, waits_for=coordinator))
        at = done
    spans.append(Span("collective", at, until_s))
    return [span for span in spans if span.end_s > span.start_s]


def _critical_writer(trace: RankTrace, write: tuple[float, float]) -> list[Span]:
    """Return the spans of the writer thread that finished last: the others were done by then.

    Only what lies in `write` counts: the coordinator's own thread opens one more stream later, for the metadata.
    """
    by_thread = [spans for thread in _threads(trace) if (spans := _clip(_writer_spans(trace, thread), *write))]
    return max(by_thread, key=lambda spans: spans[-1].end_s, default=[])


def _threads(trace: RankTrace) -> list[int]:
    return list(dict.fromkeys([item.thread for item in trace.items] + [sync.thread for sync in trace.syncs]))


def _writer_spans(trace: RankTrace, thread: int) -> list[Span]:
    spans = []
    for item in trace.items:
        if item.thread != thread:
            continue
        written_from = max(item.serialize_s, item.end_s - item.write_s)
        spans.append(Span("copy", item.copy_s, item.serialize_s, item.bytes, thread))
        # The writes lie scattered within the serialisation; their sum is exact, their place is not.
        spans.append(Span("serialize", item.serialize_s, written_from, item.bytes, thread))
        spans.append(Span("write", written_from, item.end_s, item.bytes, thread))
    spans += [Span("sync", sync.start_s, sync.end_s, 0, thread) for sync in trace.syncs if sync.thread == thread]
    return sorted((span for span in spans if span.end_s > span.start_s), key=lambda span: span.start_s)


def _clip(spans: Iterable[Span], start_s: float, end_s: float) -> list[Span]:
    clipped = (s._replace(start_s=max(s.start_s, start_s), end_s=min(s.end_s, end_s)) for s in spans)
    return [span for span in clipped if span.end_s > span.start_s]


def _fill(spans: list[Span], start_s: float, end_s: float) -> list[Span]:
    """Return the spans in order, overlaps cut from the later one, gaps filled with `other`."""
    path: list[Span] = []
    at = start_s
    for span in sorted(_clip(spans, start_s, end_s), key=lambda s: (s.start_s, s.end_s)):
        if span.end_s <= at:
            continue
        if span.start_s > at:
            path.append(Span("other", at, span.start_s))
        path.append(span._replace(start_s=max(at, span.start_s)))
        at = span.end_s
    if at < end_s:
        path.append(Span("other", at, end_s))
    return path
