"""Bounds follow from rates and bytes alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_ckpt.judge.bounds import SaveFacts, efficiency, find_bounds, place_between
from pytest_ckpt.records import Probes

GB = 10**9
LLAMA3_8B = 96_363_134_976
SYNC = SaveFacts(synced=True, copy="d2h_pageable")
rates = st.none() | st.floats(min_value=1e6, max_value=1e12)


def probes(**rates: float | None) -> Probes:
    return Probes(world_size=8, **rates)  # type: ignore[arg-type]


FOUNDING = probes(
    write_direct_Bps=267e6,
    write_synced_Bps=240e6,
    write_buffered_Bps=2.2e9,
    copy_Bps=8e9,
    serialize_Bps=20e9,
    d2h_pinned_Bps=100e9,
    d2h_pageable_Bps=11e9,
)


def test_division_of_the_founding_report() -> None:
    bounds = find_bounds(LLAMA3_8B, FOUNDING, SYNC)
    assert bounds is not None
    assert bounds.storage_s == pytest.approx(361, abs=0.5)
    assert bounds.overlapped_s == bounds.storage_s
    assert bounds.largest == "storage"
    assert efficiency(bounds.overlapped_s, 375.6) == pytest.approx(0.96, abs=0.005)
    assert 0 < place_between(bounds, 375.6) < place_between(bounds, 393.9) < 1


def test_serial_bound_is_filling_the_cache_writing_it_back_and_every_other_term() -> None:
    bounds = find_bounds(24 * GB, FOUNDING, SYNC)
    assert bounds is not None
    assert bounds.serial_s == pytest.approx(24 / 0.267 + 24 / 2.2 + 24 / 11 + 24 / 20)
    assert bounds.predicted_s == bounds.serial_s
    assert bounds.cache_s == pytest.approx(24 / 2.2)


def test_synced_writes_that_take_longer_than_their_parts_are_what_counts() -> None:
    """Each fsync costs something of its own."""
    bounds = find_bounds(GB, probes(write_direct_Bps=500e6, write_synced_Bps=250e6, write_buffered_Bps=1e9), SYNC)
    assert bounds is not None
    assert (bounds.overlapped_s, bounds.serial_s) == (2.0, 4.0)


def test_without_a_synced_rate_filling_the_cache_and_writing_it_back_add_up() -> None:
    bounds = find_bounds(GB, probes(write_direct_Bps=500e6, write_buffered_Bps=1e9), SYNC)
    assert bounds is not None
    assert (bounds.overlapped_s, bounds.serial_s) == (2.0, 3.0)


def test_save_that_does_not_sync_is_bound_by_the_page_cache_and_not_by_the_disk() -> None:
    bounds = find_bounds(22 * GB, FOUNDING, SaveFacts(synced=False, copy="none"))
    assert bounds is not None
    assert bounds.storage_s == pytest.approx(10)
    assert (bounds.cache_s, bounds.copy_s) == (0, 0)
    assert bounds.serial_s == pytest.approx(10 + 1.1)


def test_crc32_bounds_a_save_on_eight_fast_drives() -> None:
    """FACTS: 96.4 GB over eight ranks take 4.6 s to serialise and 3.7 s to write."""
    fast = probes(write_direct_Bps=26e9, write_buffered_Bps=40e9, serialize_Bps=21e9)
    bounds = find_bounds(LLAMA3_8B, fast, SaveFacts(synced=True, copy="none"))
    assert bounds is not None
    assert bounds.largest == "serialize"
    raw = find_bounds(LLAMA3_8B, fast, SaveFacts(synced=True, copy="none", serialized=False))
    assert raw is not None
    assert raw.largest == "storage"
    assert raw.serialize_s == 0


@pytest.mark.parametrize(
    ("direct", "synced", "is_synced", "expected"),
    [
        (267e6, 240e6, True, 267e6),
        (None, 240e6, True, 240e6),
        (100e6, 240e6, True, 240e6),
        (None, None, True, None),
        (267e6, 240e6, False, 1e9),
    ],
)
def test_rate_of_the_storage_is_the_most_it_was_seen_to_take(
    direct: float | None, synced: float | None, is_synced: bool, expected: float | None
) -> None:
    measured = probes(write_direct_Bps=direct, write_synced_Bps=synced, write_buffered_Bps=1e9)
    assert measured.storage_Bps(is_synced) == expected


def test_unknown_rate_gives_no_term_and_no_prediction() -> None:
    bounds = find_bounds(GB, probes(serialize_Bps=2e9), SaveFacts(synced=True, copy="host"))
    assert bounds is not None
    assert (bounds.storage_s, bounds.copy_s, bounds.predicted_s) == (None, None, None)
    assert (bounds.overlapped_s, bounds.serial_s) == (0.5, 0.5)
    assert find_bounds(GB, probes(), SYNC) is None


@given(st.integers(1, 10**15), rates, rates, rates, rates, rates, st.booleans(), st.floats(1e-6, 1e9))
def test_bounds_are_in_order_and_a_save_lies_between_them(
    count: int,
    direct: float | None,
    synced: float | None,
    buffered: float | None,
    copy: float | None,
    serialize: float | None,
    is_synced: bool,
    save_s: float,
) -> None:
    measured = probes(
        write_direct_Bps=direct,
        write_synced_Bps=synced,
        write_buffered_Bps=buffered,
        copy_Bps=copy,
        serialize_Bps=serialize,
    )
    bounds = find_bounds(count, measured, SaveFacts(synced=is_synced, copy="host"))
    if bounds is None:
        return
    assert 0 < bounds.overlapped_s <= bounds.serial_s
    assert getattr(bounds, f"{bounds.largest}_s") == bounds.overlapped_s
    assert 0 <= place_between(bounds, save_s) <= 1
    assert place_between(bounds, bounds.overlapped_s) == 0
    assert place_between(bounds, bounds.serial_s * 1.01) == 1
