"""Clocks of several hosts: what can be said of readings of CLOCK_MONOTONIC that do not share one axis.

Pure functions. Ranks leave a barrier within its latency of each other, on whatever host, and no other event is common
to all. So durations across hosts count from each rank's own exit from the barrier before the round; for pictures, and
for who waited for whom, the offsets between the hosts' clocks are estimated from several exits, with their error.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from pytest_ckpt.measure.spans import RankTrace


class ClockOffset(msgspec.Struct, frozen=True, kw_only=True):
    """What must be added to readings of one host's clock to have them on host 0's."""

    offset_s: float
    error_s: float
    """Half the range of the single estimates, and no less than the spread of exits within one host."""


def clock_offsets(exits: Sequence[Sequence[float]], hosts: Sequence[int]) -> list[ClockOffset]:
    """Return each host's offset; `exits` holds each rank's readings after the same barriers, `hosts` their hosts.

    At each barrier the first of a host's ranks to leave stands for it.
    """
    firsts = [
        [
            min(exits[rank][barrier] for rank, host in enumerate(hosts) if host == number)
            for number in range(max(hosts) + 1)
        ]
        for barrier in range(len(exits[0]))
    ]
    spread = max(
        max(readings) - min(readings)
        for barrier in range(len(exits[0]))
        for number in range(max(hosts) + 1)
        if (readings := [exits[rank][barrier] for rank, host in enumerate(hosts) if host == number])
    )
    offsets = []
    for number in range(max(hosts) + 1):
        estimates = [first[0] - first[number] for first in firsts]
        error = 0.0 if number == 0 else max((max(estimates) - min(estimates)) / 2, spread)
        offsets.append(ClockOffset(offset_s=median(estimates), error_s=error))
    return offsets


def shifted(trace: RankTrace, by_s: float) -> RankTrace:
    """Return the trace with `by_s` added to all its readings."""
    return msgspec.structs.replace(
        trace,
        called_s=trace.called_s + by_s,
        returned_s=trace.returned_s + by_s,
        completed_s=trace.completed_s + by_s,
        events=[event._replace(start_s=event.start_s + by_s, end_s=event.end_s + by_s) for event in trace.events],
        items=[
            item._replace(copy_s=item.copy_s + by_s, serialize_s=item.serialize_s + by_s, end_s=item.end_s + by_s)
            for item in trace.items
        ],
        syncs=[sync._replace(start_s=sync.start_s + by_s, end_s=sync.end_s + by_s) for sync in trace.syncs],
    )
