"""Saves in a row leave nothing behind, in any mode, and what the last one wrote can be loaded."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from pytest_ckpt.save.modes import MODES, why_unavailable
from pytest_ckpt.world.spawned import SpawnedWorld

from .soak import ALLOWED_GROWTH, KINDS, children, growth, soak

SAVES = 15


@pytest.mark.parametrize(
    "mode", [mode if mode == "async-process" else pytest.param(mode, marks=pytest.mark.long) for mode in MODES]
)
def test_saves_in_a_row_leave_nothing_and_load_back_bit_for_bit(mode: str, tmp_path: Path) -> None:
    if why := why_unavailable(mode, "cpu"):
        pytest.skip(why)
    world = SpawnedWorld(2)
    try:
        found = soak(world, mode, tmp_path, SAVES)
        assert [child for pid in world.pids for child in children(psutil.Process(pid))] == []
    finally:
        world.close()
    assert found["differing"] == []
    grown = growth(found)
    assert {kind: grown[kind] for kind in KINDS if grown[kind] > ALLOWED_GROWTH[kind]} == {}
    assert {one["processes"] for one in found["closed"]} == {1}
    assert {one["segments"] for one in found["closed"]} == {0}
