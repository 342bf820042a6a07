"""What a function that runs in a rank is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from pytest_ckpt.world.mesh import MeshShape
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
    hosts: tuple[int, ...] = ()
    """Of each rank, the number of its host; empty: all ranks share one."""
    meshes: dict[MeshShape, DeviceMesh] = field(default_factory=dict)
    """Those of other shapes, made when a scenario first needed one."""

    def mesh_of(self, shape: MeshShape) -> DeviceMesh:
        """Return the mesh of `shape`: `mesh`, or one of two dimensions (replicate, shard). Collective."""
        if shape.replicate == 1:
            return self.mesh
        if shape not in self.meshes:
            from torch.distributed.device_mesh import init_device_mesh

            names = ("replicate", "shard")
            self.meshes[shape] = init_device_mesh(self.device.type, tuple(shape), mesh_dim_names=names)
        return self.meshes[shape]

    @property
    def host(self) -> int:
        """The number of this rank's host."""
        return self.hosts[self.rank] if self.hosts else 0

    @property
    def leads_host(self) -> bool:
        """Whether this is the first of its host's ranks."""
        return self.rank == (self.hosts.index(self.host) if self.hosts else 0)
