"""Whether the chunks of a tensor are the tensor: no element in none of them, none in two that differ."""

from __future__ import annotations

import itertools
import math
from collections import Counter
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
    if covered < whole:
        return Flaw("hole", f"{whole - covered} of its {whole} elements are in no chunk")
    tiled = _tiled(boxes, size) if covered == whole else False
    if tiled:
        return None
    try:
        pair = _overlapping(boxes, len(size))
    except _TooMany:
        pair = None
        if tiled is None:
            return Flaw("overlap", f"its {len(boxes)} chunks are too many to compare: not checked")
    if pair is not None:
        return Flaw("overlap", f"the chunks at {list(pair[0])} and {list(pair[1])} overlap")
    return None if tiled is None else Flaw("overlap", f"some of its {len(boxes)} chunks overlap")


_Box = tuple[tuple[int, ...], tuple[int, ...]]
_MOST_CUT = 6
"""Dimensions that are cut, for which the corners of a chunk are counted: 64 of them. Meshes have 1 to 3."""
_MOST_COMPARED = 200
"""Comparisons for each chunk, on average: a hostile list could ask for as many as there are chunks."""


class _TooMany(Exception):
    pass


def _tiled(boxes: list[_Box], size: Sequence[int]) -> bool | None:
    """Return whether each element is in exactly one of `boxes`, in linear time; None where too many dimensions are cut.

    The elements of a box are what its corners add up to, each corner counted as +1 or -1 by how many of its coordinates
    are ends. So boxes are a tensor exactly where their corners cancel out to those of the tensor.
    """
    cut = [d for d in range(len(size)) if any(low[d] != 0 or high[d] != size[d] for low, high in boxes)]
    if len(cut) > _MOST_CUT:
        return None
    whole: _Box = ((0,) * len(size), tuple(size))
    corners: Counter[tuple[int, ...]] = Counter()
    for (low, high), times in itertools.chain(((box, 1) for box in boxes), [(whole, -1)] if math.prod(size) else []):
        for ends in itertools.product((False, True), repeat=len(cut)):
            at = tuple(high[d] if end else low[d] for d, end in zip(cut, ends, strict=True))
            corners[at] += -times if sum(ends) % 2 else times
    return not any(corners.values())


def _overlapping(boxes: list[_Box], dimensions: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the offsets of two boxes that have an element in common; `_TooMany` where that would take too long.

    A sweep along the dimension that is cut most often, so that few boxes are open at once: with the cuts of a device
    mesh, as many as the other dimensions have.
    """
    if len(boxes) < 2:
        return None
    left = _MOST_COMPARED * len(boxes)
    along = max(range(dimensions), key=lambda d: len({low[d] for low, _ in boxes}))
    opened: list[_Box] = []
    for low, high in sorted(boxes, key=lambda box: box[0][along]):
        left -= len(opened)
        if left < 0:
            raise _TooMany
        opened = [other for other in opened if other[1][along] > low[along]]
        for other_low, other_high in opened:
            if all(low[d] < other_high[d] and other_low[d] < high[d] for d in range(dimensions)):
                return other_low, low
        opened.append((low, high))
    return None
