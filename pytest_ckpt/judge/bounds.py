"""The least time in which the measured resources admit a save, and how near to it a save came.

Each resource gives one term: logical bytes over its rate at the ranks' own concurrency. A save whose steps overlap
completely takes as long as its largest term, one that does a step at a time takes as long as all of them together.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pytest_ckpt.records import Bounds, Probes

CopyKind = Literal["none", "host", "d2h_pinned", "d2h_pageable"]


class SaveFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a way of saving does with each byte."""

    synced: bool
    """The writer fsyncs; without that a save ends when the page cache has taken it."""
    copy: CopyKind
    """How the state gets out of training's reach: `none` for a synchronous save of host tensors."""
    serialized: bool = True
    """torch.save, which takes a crc32 of all bytes; False for formats that write tensors as they are."""


def find_bounds(logical_bytes: int, rates: Probes, facts: SaveFacts) -> Bounds | None:
    """Return the bounds of saving `logical_bytes`, or None where no rate that matters is known."""
    copy_Bps = {
        "none": None,
        "host": rates.copy_Bps,
        "d2h_pinned": rates.d2h_pinned_Bps,
        "d2h_pageable": rates.d2h_pageable_Bps,
    }[facts.copy]
    storage_s = _seconds(logical_bytes, rates.storage_Bps(facts.synced))
    cache_s = _seconds(logical_bytes, rates.write_buffered_Bps) if facts.synced else 0.0
    synced_s = _seconds(logical_bytes, rates.write_synced_Bps) if facts.synced else None
    copy_s = 0.0 if facts.copy == "none" else _seconds(logical_bytes, copy_Bps)
    serialize_s = _seconds(logical_bytes, rates.serialize_Bps) if facts.serialized else 0.0
    overlapped_s = max(term or 0.0 for term in (storage_s, cache_s, copy_s, serialize_s))
    if overlapped_s == 0:
        return None
    # Synced probes let one rank fill the cache while another's fsync goes on, which the ranks of a save do not.
    write_s = max((storage_s or 0.0) + (cache_s or 0.0), synced_s or 0.0)
    return Bounds(
        storage_s=storage_s,
        cache_s=cache_s,
        copy_s=copy_s,
        serialize_s=serialize_s,
        overlapped_s=overlapped_s,
        serial_s=max(overlapped_s, write_s + (copy_s or 0.0) + (serialize_s or 0.0)),
    )


def efficiency(bound_s: float, save_s: float) -> float:
    """Return the share of `save_s` that `bound_s` explains: 1 is a save as fast as its bound, less is slower."""
    return bound_s / save_s


def place_between(bounds: Bounds, save_s: float) -> float:
    """Return where a save lies between its bounds, 0 (all overlapped) to 1 (one step at a time, or slower)."""
    span_s = bounds.serial_s - bounds.overlapped_s
    if span_s <= 0:
        return 0.0 if save_s <= bounds.overlapped_s else 1.0
    return min(1.0, max(0.0, (save_s - bounds.overlapped_s) / span_s))


def _seconds(count: int, rate_Bps: float | None) -> float | None:
    return None if rate_Bps is None else count / rate_Bps
