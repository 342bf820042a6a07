"""The meshes that ranks can be laid out in: full shard, and hybrid (replicas of a shard). Needs no torch."""

from __future__ import annotations

import re
from typing import NamedTuple

from pytest_ckpt.errors import SettingError

_PART = re.compile(r"\s*(replicate|shard)\s*=\s*([1-9][0-9]{0,8})\s*")


class MeshShape(NamedTuple):
    """How many replicas of the state there are, and over how many ranks each is sharded."""

    replicate: int
    shard: int

    @property
    def size(self) -> int:
        """How many ranks it takes."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        return f"shard={self.shard}" if self.replicate == 1 else f"replicate={self.replicate},shard={self.shard}"

    def require_size(self, ranks: int, source: str) -> None:
        """Raise `SettingError` naming `source` where it is no mesh of so many `ranks`."""
        if self.size != ranks:
            raise SettingError(
                f"mesh {self} (from {source}) has {self.size} ranks and this world has {ranks}; write "
                f"--ckpt-ranks={self.size}, or a mesh whose product is {ranks}, such as shard={ranks}"
            )


def full_shard(ranks: int) -> MeshShape:
    """Return the mesh in which nothing is replicated."""
    return MeshShape(1, ranks)


def parse_mesh(text: str, source: str) -> MeshShape | None:
    """Return the mesh that `text` names (`replicate=2,shard=4`), None for nothing; `SettingError` for another."""
    if not text:
        return None
    parts = [_PART.fullmatch(part) for part in text.split(",")]
    sizes = {part[1]: int(part[2]) for part in parts if part is not None}
    if None in parts or len(sizes) < len(parts) or "shard" not in sizes:
        raise SettingError(
            f"{text!r} (from {source}) is no mesh; write shard=8, or replicate=2,shard=4 (shard is never left out)"
        )
    return MeshShape(sizes.get("replicate", 1), sizes["shard"])
