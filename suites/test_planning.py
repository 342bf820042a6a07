"""Thousands of ranks on paper: what planning a save takes of rank 0, and how that grows with the ranks."""

from __future__ import annotations

from typing import Any

import pytest

OPTIONS = {
    "plain": {},
    "cached": {"enable_plan_caching": True},
    "lowest-rank": {"dedup_save_to_lowest_rank": True},
}
"""Of DCP's planner: as it is, with plans kept from save to save, and with replicas written by the lowest rank."""


@pytest.mark.ckpt_planning
@pytest.mark.parametrize("options", OPTIONS)
def test_planning(ckpt_plan: Any, ckpt_model: Any, ckpt_plan_ranks: int, options: str) -> None:
    """Each model, number of ranks and setting of the planner is a benchmark."""
    ckpt_plan(**OPTIONS[options])


@pytest.mark.ckpt_planning
@pytest.mark.parametrize("options", OPTIONS)
def test_growth_of_planning(ckpt_plan: Any, ckpt_model: Any, options: str) -> None:
    """No step may grow like the square of the ranks (a limit of 1.6 on the exponent), but for what is known of DCP."""
    growth = ckpt_plan.growth(**OPTIONS[options])
    assert not growth.is_too_steep, str(growth)
    if growth.known:
        pytest.xfail("; ".join(growth.known))
