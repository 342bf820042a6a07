"""The state of a share of a bigger job: plain tensors, each this rank's chunk of a tensor that nobody holds whole."""

from __future__ import annotations

from typing import Any

import torch

from pytest_ckpt.model import values
from pytest_ckpt.model.geometry import Geometry
from pytest_ckpt.model.recipe import Recipe
from pytest_ckpt.model.share import Share, chunk, share_bytes
from pytest_ckpt.model.state import TrainingState, state_on_paper


class ShareState(TrainingState):
    """One rank's part of a share; `logical_bytes` are those of all ranks of the share, and of no others.

    `wholes` has the shape of the whole tensor for each key that is cut; where a rank's chunk of it begins follows.
    Where the tensor has fewer rows than the job has ranks, a chunk may be empty, as it is in the real job.
    """

    def __init__(
        self, state_dict: dict[str, Any], wholes: dict[str, tuple[int, ...]], share: Share, logical_bytes: int
    ) -> None:
        super().__init__(state_dict)
        self.wholes, self.share, self.logical_bytes = wholes, share, logical_bytes


def make_share(
    geometry: Geometry, recipe: Recipe, share: Share, rank: int, device: torch.device, seed: int = 0
) -> ShareState:
    """Return what `rank` of the `share.of` ranks of a training of `geometry` holds, kept as `recipe` says.

    Names, types and chunks are those of `make_state` on so many ranks, and values are as incompressible. There are no
    modules, no DTensors and no process group, so that nothing can be trained; the memory is that of the chunks.
    """
    wholes: dict[str, tuple[int, ...]] = {}

    def cut(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {name: cut(inner, f"{key}.{name}") for name, inner in value.items()}
        if isinstance(value, list):
            return [cut(inner, f"{key}.{place}") for place, inner in enumerate(value)]
        if not isinstance(value, torch.Tensor) or not value.ndim:  # step counters are on every rank
            return value
        wholes[key] = tuple(value.shape)
        _, rows = chunk(value.shape[0], share.of, rank)
        return torch.empty((rows, *value.shape[1:]), dtype=value.dtype, device=device)

    app: dict[str, Any] = cut(state_on_paper(geometry, recipe)["app"], "app")
    for alias, name in geometry.tied.items():
        app["model"][alias] = app["model"][name]
    for key, tensor in values.tensors({"app": app}):
        if tensor.ndim:
            values.fill(tensor, seed, key, rank, signed=not key.endswith("exp_avg_sq"))
    for name, kept in app.get("optim", {}).get("state", {}).items():
        if "master" in kept:
            app["model"][name].copy_(kept["master"])
    return ShareState({"app": app}, wholes, share, share_bytes(geometry, recipe, share))
