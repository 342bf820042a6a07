"""The way back: load what was saved, by as many ranks or by half as many, from the page cache and without it."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.ckpt_load
@pytest.mark.parametrize(
    ("mode", "resharded"),
    [("warm", False), ("cold", False), ("warm", True), ("cold", True)],
    ids=["warm", "cold", "warm-resharded", "cold-resharded"],
)
def test_load(ckpt_load: Any, ckpt_target: Any, ckpt_model: Any, ckpt_world: Any, mode: str, resharded: bool) -> None:
    """Each target, model and number of ranks is a benchmark of the time that a restart waits for its checkpoint."""
    ckpt_load(mode=mode, saved_ranks=2 * ckpt_world.size if resharded else None)
