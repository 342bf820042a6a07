"""The main job: save a real FSDP training state with DCP, again and again, and see how long it takes."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.ckpt_save
def test_save(
    ckpt_save: Any, ckpt_target: Any, ckpt_model: Any, ckpt_world: Any, ckpt_mode: str, ckpt_writer: Any
) -> None:
    """Each mode on each target, model, number of ranks and combination of the writer's options is a benchmark."""
    ckpt_save(mode=ckpt_mode, writer=ckpt_writer)
