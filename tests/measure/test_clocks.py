"""Clocks of several hosts: their offsets are estimated from barrier exits, with an error that holds the truth."""

from __future__ import annotations

import random
from statistics import median

import pytest

from pytest_ckpt.measure.clocks import clock_offsets, shifted
from pytest_ckpt.measure.spans import Event, Item, RankTrace, Sync

HOSTS = [0, 0, 1, 1, 2]


def exits(offsets: list[float], latency_s: float, seed: int, barriers: int = 9) -> list[list[float]]:
    """Return readings of ranks that leave each barrier up to `latency_s` late, by clocks that are `offsets` ahead."""
    chance = random.Random(seed)
    at = [100.0 + number for number in range(barriers)]
    return [[t + chance.uniform(0, latency_s) + offsets[host] for t in at] for host in HOSTS]


@pytest.mark.parametrize("seed", range(20))
def test_offset_is_found_within_its_error(seed: int) -> None:
    found = clock_offsets(exits([0.0, 5000.0, -0.25], 0.001, seed), HOSTS)
    for offset, truth in zip(found, [0.0, -5000.0, 0.25], strict=True):
        assert abs(offset.offset_s - truth) <= offset.error_s + 1e-9
        assert offset.error_s <= 0.002


def test_error_grows_with_the_latency_of_barriers() -> None:
    quick, slow = (clock_offsets(exits([0.0, 3.0, 7.0], latency, 1), HOSTS)[1].error_s for latency in (1e-4, 1e-1))
    assert slow > 100 * quick


def test_host_0_is_the_axis() -> None:
    first = clock_offsets(exits([2.0, 3.0, 4.0], 0.01, 3), HOSTS)[0]
    assert (first.offset_s, first.error_s) == (0.0, 0.0)


def test_one_late_exit_moves_no_offset() -> None:
    late = exits([0.0, 10.0, 0.0], 0.0, 5)
    for rank in (2, 3):
        late[rank][4] += 1.0
    assert median([clock_offsets(late, HOSTS)[1].offset_s]) == pytest.approx(-10.0)


def test_shifted_trace_is_the_same_trace_elsewhere() -> None:
    trace = RankTrace(
        called_s=1.0,
        returned_s=2.0,
        completed_s=3.0,
        events=[Event("local_step", 7, 1.1, 1.2)],
        items=[Item(7, 1.3, 1.4, 1.5, 0.05, 10)],
        syncs=[Sync(7, 1.6, 1.7)],
    )
    moved = shifted(trace, 10.0)
    assert (moved.called_s, moved.returned_s, moved.completed_s) == (11.0, 12.0, 13.0)
    assert moved.events == [Event("local_step", 7, 11.1, 11.2)]
    assert moved.items == [Item(7, 11.3, 11.4, 11.5, 0.05, 10)]
    assert moved.syncs == [Sync(7, 11.6, 11.7)]
    assert shifted(moved, -10.0).called_s == 1.0
