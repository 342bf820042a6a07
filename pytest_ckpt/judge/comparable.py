"""Whether two records may be compared at all, and what differs that does not stand in the way."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pytest_ckpt.judge.baseline import Session
from pytest_ckpt.judge.hardware_differences import hardware_differences
from pytest_ckpt.records import SaveRecord
from pytest_ckpt.units import format_bytes

_SAME_BYTES = 0.001


def incomparable(now: SaveRecord, stored: SaveRecord) -> str | None:
    """Return why figures of the two mean different things; None where they mean the same.

    How they were measured is compared first. A release of the plugin alone is no reason.
    """
    for name, own, theirs in (
        ("the method of measuring", now.method, stored.method),
        ("tracing", now.tracing, stored.tracing),
        ("the ranks' start method", now.start_method, stored.start_method),
    ):
        if own != theirs:
            return f"{name} differs: {own} now, {theirs} in the baseline"
    if abs(now.logical_bytes - stored.logical_bytes) > _SAME_BYTES * stored.logical_bytes:
        return (
            f"the state differs: {format_bytes(now.logical_bytes)} now, {format_bytes(stored.logical_bytes)} in the "
            "baseline"
        )
    return None


def comparable_sessions(now: SaveRecord, sessions: Sequence[Session]) -> list[Session]:
    """Return those of `sessions` that `now` may be compared with."""
    return [session for session in sessions if all(incomparable(now, other) is None for other in session.records)]


def changed_surroundings(now: SaveRecord, stored: SaveRecord) -> list[str]:
    """Return what of software and hardware differs, as `torch 2.13.0 (was 2.12.1)`."""
    own, theirs = msgspec.structs.asdict(now.environment), msgspec.structs.asdict(stored.environment)
    changed = [f"{name} {own[name]} (was {theirs[name]})" for name in own if own[name] != theirs[name]]
    if now.hardware is not None and stored.hardware is not None:
        changed += hardware_differences(now.hardware, stored.hardware)
    return changed
