"""Engines and writers for the tests of loads, at module level; each has one thing wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh

from pytest_ckpt.model import values
from pytest_ckpt.save.dcp import DcpEngine
from pytest_ckpt.save.engines import EngineSetup

LOST = "app.model.layers.1.attention_norm.weight"


class _LosesOneElement(DcpEngine):
    def load(self, state_dict: dict[str, Any], location: str) -> None:
        super().load(state_dict, location)
        tensor = dict(values.tensors(state_dict))[LOST]
        part = values.local(tensor)
        if torch.distributed.get_rank() == 1:
            part.view(-1)[-1] = 0


class _LoadsNothing(DcpEngine):
    def load(self, state_dict: dict[str, Any], location: str) -> None:
        pass


def loses_one_element(setup: EngineSetup) -> DcpEngine:
    return _LosesOneElement(setup.mode, setup.make_writer, setup.group, setup.options)


def loads_nothing(setup: EngineSetup) -> DcpEngine:
    return _LoadsNothing(setup.mode, setup.make_writer, setup.group, setup.options)


def plain_writer(path: str) -> FileSystemWriter:
    return FileSystemWriter(path)


class _NoMetadata(FileSystemWriter):
    def finish(self, metadata: Any, results: Any) -> None:
        pass


def own_format(path: str) -> FileSystemWriter:
    return _NoMetadata(path)


def of_all_kinds(mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """A user's state: nested, of several types, without a dimension, of one rank alone."""
    rank = mesh.get_rank()
    return {
        "step": torch.tensor(7),
        "nested": {"list": [torch.arange(5), torch.ones(2, 3, dtype=torch.bfloat16)], "name": "x"},
        "flag": torch.tensor([True, False]),
        "strided": torch.rand(6, 4).T,
        f"own{rank}": torch.rand(3),
    }
