"""What the process of a world on paper does for a benchmark: make the ranks' plans, then plan save after save."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pytest_ckpt.world.context import Rank
from pytest_ckpt.world.functions import FunctionRef, resolve


def prepare_plans(
    rank: Rank,
    *,
    model: str,
    state: str,
    ranks: int,
    options: dict[str, Any],
    planner: list[Any] | None,
) -> dict[str, Any]:
    """Make the local plans of `ranks` ranks that save geometry `model` kept as recipe `state` says.

    `options` are those of the planner; `planner` is the reference of what makes it, or None for DCP's own. The plans of
    the first two ranks, one in the middle and the last are compared with what the planner makes there.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    from pytest_ckpt.model.geometry import find_geometry
    from pytest_ckpt.model.recipe import find_recipe
    from pytest_ckpt.save.planning import PlanningOfSaves, collector_off
    from pytest_ckpt.save.simulated_ranks import SimulatedRanks
    from pytest_ckpt.save.torch_private import clear_plan_caches

    rank.memory.pop("planning", None)
    make = DefaultSavePlanner if planner is None else resolve(FunctionRef(*planner), "planner")
    make_planner = partial(make, **options)
    clear_plan_caches()
    with rank.status.phase("make the ranks on paper"):
        simulated = SimulatedRanks(find_geometry(model, "model"), find_recipe(state, "state"), ranks, make_planner)
    with rank.status.phase("compare plans on paper with the planner's"):
        checked = simulated.check({0, min(1, ranks - 1), ranks // 2, ranks - 1})
    folder = Path(rank.scratch) / "planned"
    folder.mkdir(exist_ok=True)
    with rank.status.phase("make the plans of all ranks"), collector_off():
        planning = rank.memory["planning"] = PlanningOfSaves(simulated, make_planner, folder)
    return {
        "items_per_rank": simulated.items_per_rank,
        "plan_bytes": planning.plan_bytes,
        "derive_s": planning.derive_s,
        "checked_ranks": checked,
    }


def plan_round(rank: Rank, *, alone: bool) -> dict[str, Any]:
    """Plan one save; `alone`: on a quiet core and with the collector frozen, else as a training has it."""
    from pytest_ckpt.save.planning import alone_on_a_core

    planning = rank.memory["planning"]
    with rank.status.phase("plan"), alone_on_a_core() if alone else nullcontext():
        planned: dict[str, Any] = msgspec.to_builtins(planning.save())
    return planned
