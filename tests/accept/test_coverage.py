"""Chunks cover a tensor exactly, or it is said how they do not: compared with counting each element."""

from __future__ import annotations

import itertools
import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pytest_ckpt.accept.coverage import find_flaw

Box = tuple[tuple[int, ...], tuple[int, ...]]


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A grid of chunks as device meshes make them, with some taken away, doubled or moved."""
    size = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    cuts = [sorted({0, whole, *draw(st.lists(st.integers(0, whole), max_size=2))}) for whole in size]
    spans = [list(itertools.pairwise(cut)) or [(0, 0)] for cut in cuts]
    boxes = [(tuple(a for a, _ in part), tuple(b - a for a, b in part)) for part in itertools.product(*spans)]
    for _ in range(draw(st.integers(0, 2))):
        if boxes:
            offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
            moved = tuple(offset + draw(st.integers(0, 1)) for offset in offsets)
            boxes += [[], [(offsets, sizes)] * 2, [(moved, sizes)]][draw(st.integers(0, 2))]
    return size, boxes


@given(tensors())
def test_a_flaw_is_found_where_counting_finds_one(tensor: tuple[tuple[int, ...], list[Box]]) -> None:
    size, boxes = tensor
    counts = np.zeros(tuple(whole + 2 for whole in size), int)
    for offsets, sizes in set(boxes):
        counts[tuple(slice(offset, offset + length) for offset, length in zip(offsets, sizes, strict=True))] += 1
    inside = counts[tuple(slice(0, whole) for whole in size)]
    flaw = find_flaw(size, boxes)
    assert (flaw is None) == bool((inside == 1).all() and counts.sum() == inside.sum())
    if flaw is not None and flaw.kind == "hole":
        assert (inside == 0).any()
    if flaw is not None and flaw.kind == "overlap":
        assert (counts > 1).any() or counts.sum() > inside.sum()


def test_the_chunks_of_a_thousand_ranks_take_no_time() -> None:
    rows = [((row * 4, 0), (4, 4096)) for row in range(1024)]
    grid = [((row * 128, column * 128), (128, 128)) for row in range(32) for column in range(32)]
    columns = [((0, column * 4), (4096, 4)) for column in range(1024)]
    began = time.monotonic()
    for chunks in (rows, grid, columns):
        assert find_flaw((4096, 4096), chunks) is None
    assert time.monotonic() - began < 1
