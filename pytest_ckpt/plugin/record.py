"""From what was asked for and what was measured to the record that is kept."""

from __future__ import annotations

import platform
import socket
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from typing import Any

import msgspec
import psutil

import pytest_ckpt
from pytest_ckpt.judge import findings
from pytest_ckpt.judge.bounds import efficiency
from pytest_ckpt.plugin.specs import EngineSpec, ModelSpec, WriterSpec
from pytest_ckpt.plugin.survey import Survey, bounds_of
from pytest_ckpt.records import Environment, Hardware, SaveRecord, Scenario, TargetRecord
from pytest_ckpt.save.readers import OF_WRITERS
from pytest_ckpt.target.interface import Target
from pytest_ckpt.world.functions import FunctionRef
from pytest_ckpt.world.interface import World, hosts_of
from pytest_ckpt.world.mesh import MeshShape, full_shard
from pytest_ckpt.world.rounds import Measured


@dataclass(frozen=True)
class SaveRequest:
    """One call of `ckpt_save` or `ckpt_load`, with everything resolved; `title` names it to people."""

    target: Target
    model: ModelSpec
    world: World
    mode: str
    writer: WriterSpec
    engine: EngineSpec
    overlap: bool
    """Whether an earlier save is under way when this one is called."""
    train: str | None
    """Tokens of a rank in a step of the training beside the save."""
    title: str
    tolerance: float
    """Share of the throughput that may be lost against the baseline."""
    mesh: MeshShape | None = None
    """None: full shard."""
    planner: FunctionRef | None = None
    """Of planning alone: what makes the planner; None: DCP's own."""
    saved_by: World | None = None
    """Of a load: the ranks that write the checkpoint, `world` itself where they are as many."""

    @property
    def saved_ranks(self) -> int:
        """How many ranks write the checkpoint."""
        return (self.saved_by or self.world).size


@dataclass(frozen=True)
class Origin:
    """Of one session: which it is, and on what it measures."""

    session: str
    """A random name."""
    hardware: Hardware
    driver: str | None
    """Version of the accelerators' driver."""


def scenario_of(request: SaveRequest) -> Scenario:
    """Return what identifies the figures of a request."""
    return Scenario(
        engine=request.engine.name,
        mode=request.mode,
        writer=request.writer.name,
        options=dict(request.writer.options)
        | _resharded(request)
        | _read_by(request)
        | _beside(request)
        | planner_of(request.planner)
        | _hosts(request),
        model=request.model.name,
        state=request.model.recipe.name if request.model.function is None else "user",
        params=request.model.parameters,
        world_size=request.world.size,
        mesh=str(_mesh(request)),
        device=request.world.device,
        share=None if request.model.share is None else str(request.model.share),
    )


def _mesh(request: SaveRequest) -> MeshShape:
    """Return the mesh that the tensors are cut for: of a share, that of the job which it is a part of."""
    share = request.model.share
    return request.mesh or full_shard(request.world.size if share is None else share.of)


def _read_by(request: SaveRequest) -> dict[str, str]:
    """A load by another reader than the writer's own is another load."""
    reader = request.writer.reader
    if request.saved_by is None or reader is None or reader.name == OF_WRITERS.get(request.writer.name):
        return {}
    return {"reader": reader.name}


def _beside(request: SaveRequest) -> dict[str, Any]:
    """A save beside training, or beside another save, is another than one that has the machine for itself."""
    train: dict[str, Any] = {} if request.train is None else {"train": request.train}
    return train | ({"overlap": True} if request.overlap else {})


def _hosts(request: SaveRequest) -> dict[str, int]:
    """Ranks on several hosts save over other links than as many on one."""
    hosts = hosts_of(request.world)
    return {"hosts": max(hosts) + 1} if hosts else {}


def planner_of(ref: FunctionRef | None) -> dict[str, str]:
    """Return what tells a scenario by its planner; nothing where that is DCP's own."""
    return {} if ref is None else {"planner": f"{ref.module}.{ref.name}"}


def make_record(
    request: SaveRequest,
    measured: Measured,
    began: datetime,
    survey: Survey,
    targets: list[Target],
    origin: Origin,
    hardware_id: str,
    spread: str = "",
) -> SaveRecord:
    """Return the record of a scenario that began at `began` (UTC), with what `survey` knows of its target."""
    target, scenario = request.target, scenario_of(request)
    identity = survey.identity(target)
    # The probes are of writing: they say nothing of a load, nor of planning.
    probes = survey.probes_of(target, request.world) if scenario.is_save else None
    others = survey.other_volumes(target, targets, request.world, measured.logical_bytes) if scenario.is_save else []
    record = SaveRecord(
        scenario=scenario,
        environment=_environment(origin.driver),
        host=socket.gethostname(),
        time=began.isoformat(),
        target=TargetRecord(
            label=target.label,
            kind=target.kind,
            medium=target.medium,
            mount=target.mount,
            filesystem=target.filesystem,
            device_model=identity.device_model,
            storage_class=identity.storage_class,
            storage_rule=identity.rule,
            root_filesystem=identity.root_filesystem,
            spread=spread,
        ),
        logical_bytes=measured.logical_bytes,
        stored_bytes=measured.stored_bytes,
        folder_bytes=measured.folder_bytes,
        rounds=measured.rounds,
        first_save_s=measured.first_save.save_s,
        probes=probes,
        other_volumes=others,
        memory_bytes=psutil.virtual_memory().total,
        notes=[*measured.notes, *_share_note(request)],
        planning=measured.planning,
        session=origin.session,
        hardware_id=hardware_id,
        hardware=origin.hardware,
        start_method=request.world.start_method,
        hosts=list(hosts_of(request.world)),
    )
    expected = bounds_of(scenario, record.logical_bytes, probes)
    bounds = bounds_of(scenario, record.logical_bytes, probes, findings.is_synced(record))
    record = msgspec.structs.replace(
        record,
        predicted_s=expected.predicted_s if expected else None,
        bounds=bounds,
        efficiency=efficiency(bounds.overlapped_s, record.save_s) if bounds else None,
    )
    found = findings.find(record)
    return msgspec.structs.replace(record, findings=found, bottleneck=findings.bottleneck(found))


def _share_note(request: SaveRequest) -> list[str]:
    share = request.model.share
    if share is None:
        return []
    return [
        f"share {share}: planning and metadata are those of {share.count} ranks, not of {share.of}; what was written "
        "is part of a checkpoint, and never loaded"
    ]


def _resharded(request: SaveRequest) -> dict[str, int]:
    return {} if request.saved_ranks == request.world.size else {"saved_ranks": request.saved_ranks}


def _environment(driver: str | None) -> Environment:
    return Environment(
        torch=version("torch"),
        driver=driver,
        kernel=platform.release(),
        plugin=pytest_ckpt.__version__,
        python=platform.python_version(),
    )
