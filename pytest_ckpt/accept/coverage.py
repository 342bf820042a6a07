"""Whether the chunks of a tensor are the tensor: no element in none of them, none in two that differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Flaw(NamedTuple):
    """What is wrong: `hole` or `overlap`, and one half of a sentence."""

    kind: str
    text: str


def find_flaw(size: Sequence[int], chunks: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Flaw | None:
    """Return what is wrong with `chunks`, pairs of offsets and sizes, as parts of a tensor of `size`.

    Equal chunks are replicas, and count once; empty ones (ranks without a part) cover nothing.
    """
    boxes = sorted(
        {
            (tuple(offsets), tuple(o + s for o, s in zip(offsets, sizes, strict=True)))
            for offsets, sizes in chunks
            if math.prod(sizes)
        }
    )
    for low, high in boxes:
        if any(end > whole for end, whole in zip(high, size, strict=True)):
            return Flaw("overlap", f"the chunk at {list(low)} reaches beyond the tensor's size {list(size)}")
    covered = sum(math.prod(h - lo for lo, h in zip(low, high, strict=True)) for low, high in boxes)
    whole = math.prod(size)
    pair = _overlapping(boxes, len(size))
    if covered < whole:
        return Flaw("hole", f"{whole - covered} of its {whole} elements are in no chunk")
    if pair is not None:
        return Flaw("overlap", f"the chunks at {list(pair[0])} and {list(pair[1])} overlap")
    return None


_Box = tuple[tuple[int, ...], tuple[int, ...]]


def _overlapping(boxes: list[_Box], dimensions: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the offsets of two boxes that have an element in common.

    A sweep along the dimension that is cut most often, so that few boxes are open at once: with the cuts of a device
    mesh, as many as the other dimensions have.
    """
    if len(boxes) < 2:
        return None
    along = max(range(dimensions), key=lambda d: len({low[d] for low, _ in boxes}))
    opened: list[_Box] = []
    for low, high in sorted(boxes, key=lambda box: box[0][along]):
        opened = [other for other in opened if other[1][along] > low[along]]
        for other_low, other_high in opened:
            if all(low[d] < other_high[d] and other_low[d] < high[d] for d in range(dimensions)):
                return other_low, low
        opened.append((low, high))
    return None
