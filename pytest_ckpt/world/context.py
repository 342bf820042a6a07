"""What a function that runs in a rank is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from pytest_ckpt.world.status import StatusBoard


@dataclass
class Rank:
    """A rank's place in its world, handed to every function that `World.run` runs."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """One dimension, all ranks: full shard."""
    control_group: ProcessGroup
    """gloo; for barriers around what is measured, never for training or saving."""
    save_group: ProcessGroup
    """gloo; for saves alone: an async save on the group that training uses deadlocks after a few collectives."""
    status: StatusBoard
    scratch: str
    """A folder of this world's own, removed with it."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What this rank keeps from one command to the next, such as the training state."""
