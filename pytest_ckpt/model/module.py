"""Modules generated from a geometry: the names and shapes of the real model, on any device, and its forward pass."""

from __future__ import annotations

import torch
from torch import nn

from pytest_ckpt.model.forward import Forward, find_forward
from pytest_ckpt.model.geometry import Geometry


class Block(nn.Module):
    """One layer of the stack, which FSDP shards as a whole."""

    computes: Forward | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the residual stream (batch, sequence, dim) behind this layer."""
        assert self.computes is not None, "this family has no forward pass"
        return self.computes.block(self, hidden)


class Model(nn.Module):
    """The root: blocks between an embedding and an output projection."""

    computes: Forward | None = None
    stack: str = ""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits (batch, sequence, vocab) of `tokens` (batch, sequence)."""
        assert self.computes is not None, "this family has no forward pass"
        hidden = self.computes.embed(self, tokens)
        for block in self.get_submodule(self.stack).children():
            hidden = block(hidden)
        return self.computes.logits(self, hidden)


def build_module(
    geometry: Geometry,
    device: torch.device | str = "meta",
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Return a module tree with every parameter of `geometry`, uninitialised, of `dtype`.

    `named_parameters()` yields the names and shapes of `geometry.parameters()` in their order. A tied name
    holds the same `nn.Parameter` as the first one. Called with tokens it returns their logits.
    """
    root = Model()
    made: dict[str, nn.Parameter] = {}
    for parameter in geometry.parameters():
        weight = nn.Parameter(torch.empty(parameter.shape, device=device, dtype=dtype))
        made[parameter.name] = weight
        _register(root, geometry, parameter.name, weight)
    for alias, name in geometry.tied.items():
        _register(root, geometry, alias, made[name])
    root.stack, root.computes = geometry.stack, find_forward(geometry)
    for block in blocks(root, geometry):
        assert isinstance(block, Block)
        block.computes = root.computes
    return root


def blocks(module: nn.Module, geometry: Geometry) -> nn.ModuleList:
    """Return the blocks of a module that `build_module` made from `geometry`, first layer first."""
    stack = module.get_submodule(geometry.stack)
    assert isinstance(stack, nn.ModuleList)
    return stack


def _register(root: nn.Module, geometry: Geometry, name: str, weight: nn.Parameter) -> None:
    *path, leaf = name.split(".")
    kinds: dict[str | None, type[nn.Module]] = {geometry.stack: nn.ModuleList, geometry.block_of(name): Block}
    module = root
    for depth, part in enumerate(path, start=1):
        if part not in module._modules:
            module.add_module(part, kinds.get(".".join(path[:depth]), nn.Module)())
        module = module.get_submodule(part)
    module.register_parameter(leaf, weight)
