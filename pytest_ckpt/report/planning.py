"""The table of planning by ranks on paper, how it grows, and what that means to who saves, as lines."""

from __future__ import annotations

import io
from collections.abc import Sequence
from statistics import median

from pytest_ckpt.judge.growth import LEAST_S, LEAST_SIZES, alike, growth_of
from pytest_ckpt.records import Planning, SaveRecord
from pytest_ckpt.units import format_bytes, format_seconds

BEFORE_WRITING = ("local_plan", "gather", "global_plan", "validate", "scatter")
"""The steps that come before the first byte is written."""
_LEGEND = "seconds are CPU seconds of rank 0, with Python's collector frozen; of the first save it runs, as by default"
_CACHING = "enable_plan_caching"


def planning_lines(records: Sequence[SaveRecord], width: int) -> list[str]:
    """Return a line for each number of ranks, and what they tell together.

    Seconds are medians over the rounds; `first` is the first save.
    """
    lines = [*_table(records, width), _LEGEND]
    for group in alike(records):
        lines += [f"{_name(group[-1])}: {sentence}" for sentence in _sentences(group)]
    return lines


def _table(records: Sequence[SaveRecord], width: int) -> list[str]:
    from rich.console import Console
    from rich.table import Table

    steps = dict.fromkeys(name for record in records for taken in record.rounds for name in taken.phases)
    options = any(record.scenario.options for record in records)
    table = Table(box=None, pad_edge=False, header_style="")
    for heading in ("model", "ranks", *(["options"] if options else [])):
        table.add_column(heading, no_wrap=True)
    headings = ["rounds", "planning", *(step.replace("_", " ") for step in steps), "first"]
    for heading in (*headings, "gathered", "metadata", "peak memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for record in records:
        planning = _planning(record)
        table.add_row(
            record.scenario.model,
            str(record.scenario.world_size),
            *([record.scenario.options_text] if options else []),
            str(len(record.rounds)),
            format_seconds(record.save_s),
            *(format_seconds(_step(record, step)) for step in steps),
            format_seconds(record.first_save_s or 0.0),
            format_bytes(planning.gathered_bytes),
            format_bytes(planning.metadata_bytes),
            "-" if planning.peak_bytes is None else format_bytes(planning.peak_bytes),
        )
    buffer = io.StringIO()
    Console(file=buffer, width=max(width, 200), color_system=None, markup=False, emoji=False).print(table)
    return [line.rstrip() for line in buffer.getvalue().splitlines() if line.strip()]


def _sentences(group: list[SaveRecord]) -> list[str]:
    largest = group[-1]
    planning, ranks = _planning(largest), largest.scenario.world_size
    before_s = sum(_step(largest, step) for step in BEFORE_WRITING)
    first_s = sum(planning.first_phases.get(step, 0.0) for step in BEFORE_WRITING)
    if largest.scenario.options.get(_CACHING):
        means = (
            f"at {ranks} ranks the first save plans for {format_seconds(first_s)} before the first byte is written, "
            f"later ones for {format_seconds(before_s)}; rank 0 keeps {format_bytes(planning.held_bytes)} between saves"
        )
    else:
        means = (
            f"at {ranks} ranks each save plans for {format_seconds(before_s)} on rank 0 before the first byte is "
            f"written, with Python's collector running for {format_seconds(first_s)} (the first save); "
            f"{_CACHING} leaves that to the first save"
        )
    after_s = largest.save_s - before_s
    means += (
        f"; {format_seconds(after_s)} more follow the last byte, and every rank is sent "
        f"{format_bytes(planning.metadata_bytes)} of metadata"
    )
    growth = growth_of(group)
    if growth is None:
        if len(group) < LEAST_SIZES:
            return [means, f"growth is told from {LEAST_SIZES} numbers of ranks on; measured: {len(group)}"]
        return [means, f"no step takes {format_seconds(LEAST_S)} with {ranks} ranks: growth is not told of so little"]
    return [means, *map(str, growth.steps), *growth.known]


def _name(record: SaveRecord) -> str:
    options = f" {record.scenario.options_text}" if record.scenario.options else ""
    return f"{record.scenario.model} plan{options}"


def _step(record: SaveRecord, step: str) -> float:
    return median(taken.phases.get(step, 0.0) for taken in record.rounds)


def _planning(record: SaveRecord) -> Planning:
    assert record.planning is not None, "only planning comes here"
    return record.planning
