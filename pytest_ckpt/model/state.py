"""Training state: what a training hands to `dcp.save`, real in names, shards, types and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

from pytest_ckpt.errors import SettingError
from pytest_ckpt.model import values
from pytest_ckpt.model.geometry import Geometry
from pytest_ckpt.model.mixed_adamw import MixedAdamW
from pytest_ckpt.model.module import blocks, build_module
from pytest_ckpt.model.recipe import Recipe


class AppState(Stateful):
    """Model and optimizer (if any) as one `Stateful`, the way of PyTorch's DCP tutorial."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return `{"model": ..., "optim": ...}` with sharded tensors that share memory with the training."""
        if self.optimizer is None:
            return {"model": get_model_state_dict(self.model)}
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self.optimizer is None:
            set_model_state_dict(self.model, state_dict["model"])
        else:
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state_dict["model"],
                optim_state_dict=state_dict["optim"],
            )


class TrainingState:
    """One rank's training state.

    `state_dict` is what to hand to `dcp.save` and `dcp.load`. `logical_bytes` are the bytes of all its
    tensors that have a dimension, over all ranks, each replica once and each name of a shared tensor.
    """

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self.state_dict = state_dict
        self.logical_bytes = sum(_logical_bytes(state_dict).values())
        self._turn = 0

    def advance(self) -> None:
        """Change the values in place, as training does between saves: one element in every KiB of each shard.

        What is changed are tensors with a dimension, integers and bools by their last bit. The same calls give the
        same values; a floating state never comes back, so that no storage can keep one round by pointing at another.
        """
        seen: set[tuple[int, int]] = set()
        with torch.no_grad():
            for key, tensor in values.tensors(self.state_dict):
                # Tied weights are one memory under two names: changing it twice could undo the change.
                place = values.place(tensor)
                if tensor.ndim and place not in seen:
                    seen.add(place)
                    values.change(tensor, self._turn, key)
        self._turn += 1


def make_state(
    geometry: Geometry,
    recipe: Recipe,
    mesh: DeviceMesh,
    device: torch.device,
    seed: int = 0,
) -> TrainingState:
    """Return the state of a training of `geometry` with FSDP2 on `mesh`, kept as `recipe` says, on `device`.

    Blocks and root are sharded with `fully_shard`; a mesh of two dimensions is (replicate, shard). Weights
    and optimizer tensors hold incompressible finite values that `seed`, the key and the shard decide. Memory
    never exceeds the state by more than one tensor. Collective: every rank of `mesh` calls it.
    """
    model = build_module(geometry, dtype=getattr(torch, recipe.weight_dtype))
    for block in blocks(model, geometry):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    optimizer = _optimizer(model, recipe)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values.fill(weight, seed, name)
            if optimizer is None:
                continue
            state = optimizer.state[weight] = _stepped(weight, recipe)
            for key in recipe.optimizer_tensors:
                values.fill(state[key], seed, name, key, signed=key != "exp_avg_sq")
            if "master" in state:
                weight.copy_(state["master"])
    return TrainingState({"app": AppState(model, optimizer)})


def state_on_paper(geometry: Geometry, recipe: Recipe) -> dict[str, Any]:
    """Return the state dict of a training of `geometry`, kept as `recipe` says, whole and on the meta device.

    It has the names, shapes, types and order of what `make_state` makes, and no memory; nothing is sharded.
    """
    model = build_module(geometry, dtype=getattr(torch, recipe.weight_dtype))
    optimizer = _optimizer(model, recipe)
    if optimizer is not None:
        for weight in model.parameters():
            optimizer.state[weight] = _stepped(weight, recipe)
    return {"app": AppState(model, optimizer).state_dict()}


def user_state(
    function: Callable[[DeviceMesh, torch.device], Any], name: str, mesh: DeviceMesh, device: torch.device
) -> TrainingState:
    """Return the state that the user's `function`, known to the user as `name`, makes of `mesh` and `device`.

    The function returns what would be handed to `dcp.save`: a dict of tensors, DTensors, `Stateful` objects,
    nested dicts and plain objects. `SettingError` where it returns something else. Collective: every rank calls
    it, and keys may differ from rank to rank.
    """
    state_dict = function(mesh, device)
    if not isinstance(state_dict, dict):
        raise SettingError(
            f"model {name} returned {type(state_dict).__name__!r}; it must return the state dict to save"
        )
    state = TrainingState(state_dict)
    state.logical_bytes = _over_all_ranks(state_dict)
    return state


def _optimizer(model: nn.Module, recipe: Recipe) -> Optimizer | None:
    if not recipe.optimizer_tensors:
        return None
    make = MixedAdamW if "master" in recipe.optimizer_tensors else AdamW
    return make(model.parameters())


def _stepped(weight: torch.Tensor, recipe: Recipe) -> dict[str, torch.Tensor]:
    """Return what a first step would make of a weight, not filled; taking one would need gradients, a second copy."""
    state = {"step": torch.tensor(1.0)}
    for key in recipe.optimizer_tensors:
        state[key] = torch.empty_like(weight, dtype=torch.float32, requires_grad=False)
    return state


def _logical_bytes(state_dict: Mapping[str, Any]) -> dict[str, int]:
    return {key: t.numel() * t.element_size() for key, t in values.tensors(state_dict) if t.ndim}


def _over_all_ranks(state_dict: Mapping[str, Any]) -> int:
    own = _logical_bytes(state_dict)
    ranks: list[Any] = [own]
    if dist.is_initialized():
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
    # A key on several ranks is one tensor: sharded, or a replica that DCP stores once.
    return sum({key: size for rank in ranks for key, size in rank.items()}.values())
