"""Watching whatever engine saves: as closely as it lets us."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from pytest_ckpt.measure.spans import Event, RankTrace
from pytest_ckpt.save.background import BackgroundSave, BackgroundTrace
from pytest_ckpt.save.dcp import DcpEngine
from pytest_ckpt.save.engine import Engine, TimedSave
from pytest_ckpt.save.trace import SaveTrace


class Noted(NamedTuple):
    """What was noted of one save on one rank."""

    trace: RankTrace
    streams_seen: bool
    background: BackgroundSave | None


class WatchedSave:
    """One save of an engine that was prepared: to be watched while it runs, and told about afterwards."""

    def __init__(self, engine: Engine, scratch: str) -> None:
        self._trace = SaveTrace()
        self._background: BackgroundTrace | None = None
        self._streams_seen = False
        if not isinstance(engine, DcpEngine) or engine.writer is None:
            return
        if engine.mode.process:
            self._background = BackgroundTrace(scratch)
            engine.writer = self._background.writer(engine.writer)
            engine.planner = self._background.planner(engine.planner_class, engine.planner_options)
        else:
            self._streams_seen = self._trace.watch_writer(engine.writer)
            engine.planner = self._trace.planner(engine.planner_class, **engine.planner_options)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Take note for the length of the block."""
        with self._trace.running():
            yield

    def result(self, timed: TimedSave) -> Noted:
        """Return what was noted."""
        own = self._trace.result(timed.called_s, timed.returned_s, timed.completed_s)
        if timed.waited_s > 0:  # what the earlier save did meanwhile is not this one's
            begun_s = timed.called_s + timed.waited_s
            own = msgspec.structs.replace(
                own,
                events=[
                    Event("earlier_save", 0, timed.called_s, begun_s),
                    *(event for event in own.events if event.end_s > begun_s),
                ],
                items=[item for item in own.items if item.end_s > begun_s],
                syncs=[sync for sync in own.syncs if sync.end_s > begun_s],
            )
        if timed.unblocked_s > timed.returned_s:  # a stager's own thread is not DCP's to tell of
            staging = Event("stage_state_dict", 0, timed.returned_s, timed.unblocked_s)
            own = msgspec.structs.replace(own, events=[*own.events, staging])
        background = self._background.collect() if self._background is not None else None
        if background is None:
            return Noted(own, self._streams_seen, None)
        theirs = background.trace
        both = msgspec.structs.replace(
            own,
            events=own.events + theirs.events,
            items=own.items + theirs.items,
            syncs=own.syncs + theirs.syncs,
            global_syncs=own.global_syncs + theirs.global_syncs,
            tracer_s=own.tracer_s + theirs.tracer_s,
            planned_bytes=theirs.planned_bytes,
        )
        return Noted(both, background.streams_seen, background)


def watch_engine(engine: Engine, scratch: str) -> WatchedSave:
    """Return the next save of `engine`, watched; `scratch` is a folder of this rank's own."""
    return WatchedSave(engine, scratch)
