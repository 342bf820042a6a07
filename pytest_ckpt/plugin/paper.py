"""What tests that plan with ranks on paper will need, whether it fits, and the lines that say so beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from pytest_ckpt.errors import CannotFit, SettingError
from pytest_ckpt.measure.memory import available_memory_bytes
from pytest_ckpt.model.geometry import find_geometry
from pytest_ckpt.plugin.plan import params_of
from pytest_ckpt.plugin.settings import Settings
from pytest_ckpt.plugin.specs import ModelSpec
from pytest_ckpt.units import format_bytes

if TYPE_CHECKING:
    from pytest_ckpt.plugin.run import Run

_PROCESS_BYTES = 500_000_000
_ITEM_BYTES = 5000
"""Of one write item of one rank at most: its plan, pickled and not, before and after the global plan, and metadata."""
_OTHER_ITEMS = 20
"""Settings of the optimizer, each an item too."""


@dataclass(frozen=True)
class PaperNeed:
    """One number of ranks that plan one model."""

    model: ModelSpec
    ranks: int

    @classmethod
    def of_item(cls, item: pytest.Item, run: Run) -> PaperNeed:
        """Return the need of a test, from its parameters or the session's first of each."""
        params = params_of(item)
        model = params.get("ckpt_model")
        ranks = params.get("ckpt_plan_ranks", run.settings.plan_ranks[0])
        models = run.settings.plan_models
        return cls(run.settings.model(model) if isinstance(model, str) else models[0], int(ranks))

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory, at most."""
        geometry, recipe = find_geometry(self.model.name, "ckpt_model"), self.model.recipe
        each = 1 + len(recipe.optimizer_tensors) + bool(recipe.optimizer_tensors)
        items = geometry.tensor_count * each + len(geometry.tied) + _OTHER_ITEMS
        return _PROCESS_BYTES + items * self.ranks * _ITEM_BYTES

    def check(self) -> None:
        """Raise `SettingError` for a model that has no geometry, and `CannotFit` where memory is too small."""
        if self.model.function is not None:
            raise SettingError(
                f"{self.model.name} is your own model, and planning on paper needs the names and shapes of a known one "
                "without making it; write --ckpt-model=llama3-8b, or another of the geometries"
            )
        need, free = self.memory_bytes, available_memory_bytes()
        if need > free:
            raise CannotFit(
                f"planning of {self.model.name} with {self.model.recipe.name} by {self.ranks} ranks on paper needs up "
                f"to {format_bytes(need)} of memory and {format_bytes(free)} are available; choose a smaller "
                "--ckpt-plan-ranks or --ckpt-model"
            )


def plans_only(item: pytest.Item) -> bool:
    """Return whether a test plans, and neither saves nor loads."""
    fixtures = getattr(item, "fixturenames", [])
    return "ckpt_plan" in fixtures and not {"ckpt_save", "ckpt_load"} & set(fixtures)


def header_lines(needs: Sequence[PaperNeed], settings: Settings) -> list[str]:
    """Return a line for each model: what is planned, by how many ranks, and that it fits."""
    lines = []
    given = {model.name for model in settings.models if not settings.reasons.get("model", "").startswith("auto")}
    for model in dict.fromkeys(need.model for need in needs):
        own = [need for need in needs if need.model == model]
        ranks = ", ".join(str(count) for count in dict.fromkeys(need.ranks for need in own))
        why = "" if model.name in given else " (default of planning)"
        default = " (default)" if "plan-ranks" in settings.reasons else ""
        lines.append(
            f"ckpt: planning only, on paper: {model.name}{why}, {model.recipe.name}, full shard over {ranks} "
            f"ranks{default} by one CPU process; nothing is saved; needs up to "
            f"{format_bytes(max(need.memory_bytes for need in own))} of {format_bytes(available_memory_bytes())} "
            "memory: fits"
        )
    return lines
