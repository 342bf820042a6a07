"""Recipes: which tensors, of which type, a training state keeps for each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pytest_ckpt.errors import unknown_name
from pytest_ckpt.model.geometry import Geometry

_ITEMSIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Recipe:
    """Weights of one type, and the float32 tensors that the optimizer keeps for each parameter.

    `weight_dtype` is torch's name of the type. No `optimizer_tensors` means that no optimizer is saved.
    """

    name: str
    weight_dtype: str
    optimizer_tensors: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of one element of a weight."""
        return _ITEMSIZE[self.weight_dtype]

    @property
    def optimizer_bytes(self) -> int:
        """Bytes that the optimizer keeps for one element of a weight."""
        return 4 * len(self.optimizer_tensors)

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of weight and optimizer for one element of an untied weight."""
        return self.weight_bytes + self.optimizer_bytes


_ALL = (
    Recipe("fp32-adamw", "float32", ("exp_avg", "exp_avg_sq")),
    Recipe("mixed-adamw", "bfloat16", ("master", "exp_avg", "exp_avg_sq")),
    Recipe("weights-bf16", "bfloat16", ()),
)

RECIPES: Mapping[str, Recipe] = MappingProxyType({r.name: r for r in _ALL})


def find_recipe(name: str, source: str) -> Recipe:
    """Return the recipe called `name`; `SettingError` naming `source` where there is none."""
    try:
        return RECIPES[name]
    except KeyError:
        raise unknown_name("state recipe", name, RECIPES, source) from None


def state_bytes(geometry: Geometry, recipe: Recipe) -> int:
    """Return the bytes of all tensors with a dimension that DCP is asked to store, over all ranks.

    A tied weight counts under each of its names, as `state_dict()` lists it and DCP stores it; its optimizer
    tensors count once, as the optimizer knows the parameter and not its names. Step counters have no
    dimension.
    """
    weights = geometry.parameter_count + geometry.tied_count
    return weights * recipe.weight_bytes + geometry.parameter_count * recipe.optimizer_bytes
