"""What the tests of meshes and shares run in ranks."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pytest_ckpt.model import values
from pytest_ckpt.world.context import Rank


def writer(path: str) -> FileSystemWriter:
    return FileSystemWriter(path)


def stored_parts(location: Path) -> list[tuple[int, str, tuple[int, ...], torch.Tensor]]:
    """Rank, key, offset and values of all that is stored of tensors with a dimension, as the files have it."""
    metadata = FileSystemReader(location).read_metadata()
    found = []
    for index, info in metadata.storage_data.items():
        stored = metadata.state_dict_metadata[index.fqn]
        if not isinstance(stored, TensorStorageMetadata) or not stored.size:
            continue
        with (location / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            tensor = torch.load(io.BytesIO(file.read(info.length)), weights_only=True)
        rank = int(info.relative_path.removeprefix("__").partition("_")[0])
        found.append((rank, index.fqn, tuple(index.offset or ()), tensor))
    return found


def differing_parts(rank: Rank, location: str) -> list[str]:
    """The keys of which this rank's file holds something else than its state does; advancing comes before a save."""
    own = dict(values.tensors(rank.memory["state"].state_dict))
    mine = [(key, tensor) for writer, key, _, tensor in stored_parts(Path(location)) if writer == rank.rank]
    return [key for key, tensor in mine if not torch.equal(tensor, values.local(own[key]))]


def mesh_of_state(rank: Rank) -> list[Any]:
    tensor = next(t for _, t in values.tensors(rank.memory["state"].state_dict) if t.ndim)
    mesh: Any = getattr(tensor, "device_mesh", None)
    return [] if mesh is None else [list(mesh.mesh_dim_names), list(mesh.shape)]


def mesh_is_kept(rank: Rank) -> int:
    return len(rank.meshes)
