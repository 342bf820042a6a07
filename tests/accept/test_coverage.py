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


@given(tensors())
def test_with_many_dimensions_cut_the_same_is_found(tensor: tuple[tuple[int, ...], list[Box]]) -> None:
    """Seven dimensions more, all cut, are too many for counting corners."""
    size, boxes = tensor
    flaw = find_flaw(size, boxes)
    rest = [(tuple(int(d == cut) for d in range(7)), tuple(1 if d <= cut else 2 for d in range(7))) for cut in range(7)]
    parts = [((0,) * 7, (1,) * 7), *rest]
    wide = [(offsets + low, sizes + length) for offsets, sizes in boxes for low, length in parts]
    found = find_flaw((*size, *(2,) * 7), wide)
    assert (found and found.kind) == (flaw and flaw.kind)


def test_the_chunks_of_a_thousand_ranks_take_no_time() -> None:
    rows = [((row * 4, 0), (4, 4096)) for row in range(1024)]
    grid = [((row * 128, column * 128), (128, 128)) for row in range(32) for column in range(32)]
    columns = [((0, column * 4), (4096, 4)) for column in range(1024)]
    began = time.monotonic()
    for chunks in (rows, grid, columns):
        assert find_flaw((4096, 4096), chunks) is None
    assert time.monotonic() - began < 1


def test_a_list_of_chunks_that_is_made_to_take_long_takes_no_time() -> None:
    whole = 6000
    columns = [((i, i), (whole - i, 1)) for i in range(whole)]
    rows = [((i, i + 1), (1, whole - i - 1)) for i in range(whole)]
    twice = [*columns, *(((i, whole + i + 1), (1, whole - i - 1)) for i in range(whole))]
    doubled = [((0, i), (whole, 2)) for i in range(whole - 1)] + [((i, 0), (1, whole)) for i in range(whole)]
    began = time.process_time()
    found = [
        find_flaw((whole, whole), columns),
        find_flaw((whole, whole), columns + rows),
        find_flaw((whole, whole), columns + rows[1:] + columns[:1]),
        find_flaw((whole, 2 * whole), twice),
        find_flaw((whole, whole), doubled),
    ]
    assert [flaw and flaw.kind for flaw in found] == ["hole", None, "hole", "hole", "overlap"]
    assert time.process_time() - began < 3
