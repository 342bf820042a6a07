"""Chunks cover a tensor exactly, or it is said how they do not: compared with counting each element."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pytest_ckpt.accept.coverage import find_flaw

from ..scaling import growth_exponent

Box = tuple[tuple[int, ...], tuple[int, ...]]
Ladder = tuple[tuple[int, int], list[tuple[tuple[int, int], tuple[int, int]]]]


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


def meshes(ranks: int) -> list[list[Box]]:
    """The chunks of a square tensor in rows, in columns and in a grid, as `ranks` ranks have them."""
    whole, side = 4 * ranks, math.isqrt(ranks)
    width = whole // side
    return [
        [((row * 4, 0), (4, whole)) for row in range(ranks)],
        [((0, column * 4), (whole, 4)) for column in range(ranks)],
        [((row * width, column * width), (width, width)) for row in range(side) for column in range(side)],
    ]


def test_the_chunks_of_many_ranks_take_a_time_that_grows_with_their_number() -> None:
    def check(every: list[list[Box]]) -> None:
        whole = every[0][0][1][1]
        assert [find_flaw((whole, whole), chunks) for chunks in every] == [None] * 3

    assert growth_exponent(meshes, check, 1024, 16384) < 1.5


def ladders(whole: int) -> list[Ladder]:
    """Tensors with chunks that are as long as they are many, which comparing each with each other would take."""
    columns = [((i, i), (whole - i, 1)) for i in range(whole)]
    rows = [((i, i + 1), (1, whole - i - 1)) for i in range(whole)]
    twice = [*columns, *(((i, whole + i + 1), (1, whole - i - 1)) for i in range(whole))]
    doubled = [((0, i), (whole, 2)) for i in range(whole - 1)] + [((i, 0), (1, whole)) for i in range(whole)]
    return [
        ((whole, whole), columns),
        ((whole, whole), columns + rows),
        ((whole, whole), columns + rows[1:] + columns[:1]),
        ((whole, 2 * whole), twice),
        ((whole, whole), doubled),
    ]


def test_a_list_of_chunks_that_is_made_to_take_long_takes_a_time_that_grows_with_its_length() -> None:
    def check(every: list[Ladder]) -> None:
        found = [find_flaw(size, chunks) for size, chunks in every]
        assert [flaw and flaw.kind for flaw in found] == ["hole", None, "hole", "hole", "overlap"]

    assert growth_exponent(ladders, check, 750, 6000) < 1.5
