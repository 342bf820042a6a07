"""The engines by name, and how a user's own comes in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pytest_ckpt.errors import SettingError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from pytest_ckpt.save.engine import Engine

DEFAULT_ENGINE = "dcp"
ENGINES = (DEFAULT_ENGINE, "torch-checkpointing")
PACKAGES = {"torch-checkpointing": "torch_checkpointing"}
"""The package that an engine needs beside torch; the extra that brings it has the engine's name."""
PARTS = ("prepare", "start", "stored_bytes", "load", "close")
"""What an engine has: the methods of `Engine`."""


@dataclass(frozen=True)
class PlannerSetup:
    """Another planner than DCP's own; it travels to the background process as class and arguments."""

    made_by: Any
    """A subclass of `DefaultSavePlanner` at module level, which takes that one's arguments too."""
    arguments: dict[str, Any]
    """At least one."""


@dataclass(frozen=True)
class EngineSetup:
    """What an engine is made from, on one rank."""

    mode: str
    """As `--ckpt-mode` names it; an engine refuses what it has not, with a `SettingError`."""
    group: ProcessGroup
    """gloo, all ranks, for saves alone."""
    device: torch.device
    make_writer: Callable[[str], Any]
    """From a path to a `StorageWriter`, with the options in force; of `dcp`."""
    options: dict[str, Any] = field(default_factory=dict)
    """`--ckpt-writer-opt`, for engines that have no writers."""
    planner: PlannerSetup | None = None
    """Of `dcp`, where the state needs a planner of its own."""
    make_reader: Callable[[str], Any] | None = None
    """From a path to a `StorageReader`; of `dcp`. None: what it takes for a path by itself."""


def require_engine(name: str) -> None:
    """Raise `SettingError` where the engine called `name` needs a package that is not installed; imports nothing."""
    package = PACKAGES.get(name)
    if package is not None and find_spec(package) is None:
        raise SettingError(f"engine {name} is not installed; pip install pytest-ckpt[{name}]")


def make_engine(name: str, setup: EngineSetup, factory: Callable[[EngineSetup], Any] | None = None) -> Engine:
    """Return the engine called `name`, or what a user's `factory` makes; `SettingError` where that is none."""
    if factory is not None:
        made = factory(setup)
        missing = [part for part in PARTS if not callable(getattr(made, part, None))]
        if missing:
            raise SettingError(
                f"engine {name} returned {type(made).__name__!r}, which has no {missing[0]}(); see "
                "pytest_ckpt.save.engine.Engine for what an engine is"
            )
        return made  # type: ignore[no-any-return]
    require_engine(name)
    if name == "torch-checkpointing":
        from pytest_ckpt.save.torch_checkpointing import TorchCheckpointingEngine

        return TorchCheckpointingEngine(setup)
    from pytest_ckpt.save.dcp import DcpEngine

    return DcpEngine(
        setup.mode, setup.make_writer, setup.group, setup.options, setup.planner, make_reader=setup.make_reader
    )
