"""From what was asked for and what was measured to the record that is kept."""

from __future__ import annotations

import platform
import socket
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version

import pytest_ckpt
from pytest_ckpt.plugin.settings import ModelSpec, WriterSpec
from pytest_ckpt.records import Environment, SaveRecord, Scenario, TargetRecord
from pytest_ckpt.target.interface import Target
from pytest_ckpt.world.interface import World
from pytest_ckpt.world.rounds import Measured


@dataclass(frozen=True)
class SaveRequest:
    """One call of `ckpt_save`, with everything resolved; `title` names it to people."""

    target: Target
    model: ModelSpec
    world: World
    mode: str
    writer: WriterSpec
    title: str


def make_record(request: SaveRequest, measured: Measured, began: datetime) -> SaveRecord:
    """Return the record of a scenario that began at `began` (UTC)."""
    target = request.target
    return SaveRecord(
        scenario=Scenario(
            engine="dcp",
            mode=request.mode,
            writer=request.writer.name,
            options={},
            model=request.model.name,
            state=request.model.recipe.name if request.model.function is None else "user",
            params=request.model.parameters,
            world_size=request.world.size,
            mesh=f"shard={request.world.size}",
            device=request.world.device,
        ),
        environment=_environment(),
        host=socket.gethostname(),
        time=began.isoformat(),
        target=TargetRecord(
            label=target.label,
            kind=target.kind,
            medium=target.medium,
            mount=target.mount,
            filesystem=target.filesystem,
        ),
        logical_bytes=measured.logical_bytes,
        stored_bytes=measured.stored_bytes,
        folder_bytes=measured.folder_bytes,
        rounds=measured.rounds,
        first_save_s=measured.first_save.save_s,
        notes=measured.notes,
    )


def _environment() -> Environment:
    return Environment(
        torch=version("torch"),
        driver=None,
        kernel=platform.release(),
        plugin=pytest_ckpt.__version__,
        python=platform.python_version(),
    )
