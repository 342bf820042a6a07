"""A share of a bigger job: K real ranks hold and write what the first K of its N ranks would. Needs no torch.

FSDP cuts each tensor along its first dimension into N equal chunks, rounded up, so that the last ranks hold less, or
nothing: the first ranks are the fullest.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from pytest_ckpt.errors import SettingError
from pytest_ckpt.model.geometry import Geometry
from pytest_ckpt.model.recipe import Recipe

PARTIAL = "PARTIAL.txt"
"""Beside the files of a checkpoint: it is a share of one, and nothing may load it."""
PARTIAL_SIGN = "This is no checkpoint"
"""What the file begins with."""
_SHARE = re.compile(r"\s*([1-9][0-9]{0,8})\s*/\s*([1-9][0-9]{0,8})\s*")


@dataclass(frozen=True)
class Share:
    """Of a full shard over `of` ranks, what the first `count` hold."""

    count: int
    of: int

    def __str__(self) -> str:
        return f"{self.count}/{self.of}"


def parse_share(text: str, source: str) -> Share | None:
    """Return the share that `text` names (`2/64`), None for nothing; `SettingError` naming `source` for another."""
    if not text:
        return None
    match = _SHARE.fullmatch(text)
    if match is None:
        raise SettingError(f"{text!r} (from {source}) is no share of a job: write K/N, as in 2/64")
    share = Share(int(match[1]), int(match[2]))
    if share.count >= share.of:
        raise SettingError(
            f"{text!r} (from {source}) is no part of a job: K must be less than N, as in 2/64; for a whole job of "
            f"{share.count} ranks write --ckpt-ranks={share.count}"
        )
    return share


def chunk(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return offset and length of a rank's part of `length` rows, as `Shard(0)` cuts them; it may be empty."""
    rows = -(-length // ranks)
    start = min(rank * rows, length)
    return start, min(rows, length - start)


def rank_bytes(geometry: Geometry, recipe: Recipe, ranks: int, rank: int) -> int:
    """Return the bytes of all tensors with a dimension that `rank` of `ranks` holds; their sum is `state_bytes`."""
    total = 0
    tied = list(geometry.tied.values())
    for parameter in geometry.parameters():
        _, rows = chunk(parameter.shape[0], ranks, rank)
        names = 1 + tied.count(parameter.name)
        total += rows * math.prod(parameter.shape[1:]) * (names * recipe.weight_bytes + recipe.optimizer_bytes)
    return total


def share_bytes(geometry: Geometry, recipe: Recipe, share: Share) -> int:
    """Return the bytes that the ranks of `share` hold together."""
    return sum(rank_bytes(geometry, recipe, share.of, rank) for rank in range(share.count))
