"""From the ranks' traces and counters to the phases and resources of a round."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pytest_ckpt.measure.resources import PageCacheWatch
from pytest_ckpt.measure.spans import RankTrace, Span, phase_seconds, slowest_rank, thread_seconds, timelines
from pytest_ckpt.records import RankRound, Round


class RankUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank used in a round."""

    cpu_s: float
    write_bytes: int | None
    streams_seen: bool
    read_bytes: int | None = None
    disk: tuple[int, float] | None = None
    """Of the target's block devices: bytes written, and busy seconds of the busiest."""


def with_usage(one: Round, usages: Sequence[RankUsage], cache: PageCacheWatch) -> Round:
    """Return the round with what its ranks, the page cache and the block devices did."""
    disk = next((usage.disk for usage in usages if usage.disk is not None), None)
    ranks = [
        msgspec.structs.replace(rank, cpu_s=usage.cpu_s, write_bytes=usage.write_bytes, read_bytes=usage.read_bytes)
        for rank, usage in zip(one.ranks, usages, strict=True)
    ]
    return msgspec.structs.replace(
        one,
        ranks=ranks,
        traced=all(usage.streams_seen for usage in usages),
        dirty_peak_bytes=cache.dirty_peak_bytes,
        least_available_bytes=cache.least_available_bytes,
        device_written_bytes=None if disk is None else disk[0],
        device_busy_share=None if disk is None else min(1.0, disk[1] / one.save_s),
    )


def with_phases(one: Round, traces: Sequence[RankTrace]) -> tuple[Round, list[list[Span]]]:
    """Return the round with the phases of its ranks, and each rank's spans."""
    spans = timelines(traces)
    waited = any(span.phase == "wait" for rank in spans for span in rank)
    slowest = slowest_rank(spans) if waited else one.straggler
    ranks = [_with_phases(rank, own, trace) for rank, own, trace in zip(one.ranks, spans, traces, strict=True)]
    traced = msgspec.structs.replace(
        one,
        ranks=ranks,
        phases=ranks[slowest].phases,
        straggler=slowest,
        synced_files=sum(len(trace.syncs) for trace in traces),
        global_syncs=sum(trace.global_syncs for trace in traces),
        tracer_s=max(trace.tracer_s for trace in traces),
    )
    return traced, spans


def _with_phases(rank: RankRound, spans: list[Span], trace: RankTrace) -> RankRound:
    waits: dict[str, float] = {}
    for span in spans:
        if span.waits_for is not None:
            waits[str(span.waits_for)] = waits.get(str(span.waits_for), 0.0) + span.seconds
    return msgspec.structs.replace(
        rank,
        phases=phase_seconds(spans),
        thread_s=thread_seconds(trace),
        waits=waits,
        item_bytes=sum(item.bytes for item in trace.items),
        planned_bytes=trace.planned_bytes,
    )
