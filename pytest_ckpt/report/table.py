"""The summary tables of a run, as lines."""

from __future__ import annotations

import io
from collections.abc import Sequence
from statistics import median

from pytest_ckpt.records import SaveRecord, options_text
from pytest_ckpt.report.planning import planning_lines
from pytest_ckpt.units import format_seconds, three_digits

_DEFAULT_ENGINE = "dcp"
_DEFAULT_WRITER = "FileSystemWriter"


def summary_lines(rows: Sequence[tuple[str | None, SaveRecord]], width: int) -> list[str]:
    """Return a table with a line per (name, record) that saves, and one each of those that load and that plan.

    Times are medians over the rounds, with least and greatest.
    """
    saves = [(name, record) for name, record in rows if record.scenario.is_save]
    loads = [(name, record) for name, record in rows if record.scenario.is_load]
    plans = [record for _, record in rows if record.scenario.is_plan]
    return (
        (_table(saves, "save", width) if saves else [])
        + (_table(loads, "load", width) if loads else [])
        + (planning_lines(plans, width) if plans else [])
    )


def _table(rows: Sequence[tuple[str | None, SaveRecord]], noun: str, width: int) -> list[str]:
    from rich.console import Console
    from rich.table import Table

    is_load = noun == "load"
    named = any(name for name, _ in rows)
    engines = len({record.scenario.engine for _, record in rows} | {_DEFAULT_ENGINE}) > 1
    writers = len({record.scenario.writer for _, record in rows} | {_DEFAULT_WRITER}) > 1
    options = any(_options(record) for _, record in rows)
    layouts = any(record.scenario.layout for _, record in rows)
    trained = any(r.effective_cost_s is not None for _, record in rows for r in record.rounds)
    table = Table(box=None, pad_edge=False, header_style="")
    headings = [*(["name"] if named else []), "target", "model", "ranks", *(["mesh"] if layouts else [])]
    headings += [*(["saved by"] if is_load else []), "mode"]
    headings += [*(["engine"] if engines else []), *(["writer"] if writers else []), *(["options"] if options else [])]
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    costs = ["training", "cost"] if trained else []
    for heading in ("rounds", noun, "(min .. max)", *([] if is_load else ["stall"]), *costs, "GB/s", f"first {noun}"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, record in rows:
        scenario = record.scenario
        seconds = [r.save_s for r in record.rounds]
        first = format_seconds(record.first_save_s) if record.first_save_s is not None else "-"
        table.add_row(
            *([name or ""] if named else []),
            record.target.label,
            scenario.model,
            str(scenario.world_size),
            *([scenario.layout or scenario.mesh] if layouts else []),
            *([str(scenario.saved_ranks)] if is_load else []),
            scenario.mode,
            *([scenario.engine] if engines else []),
            *([scenario.writer] if writers else []),
            *([_options(record)] if options else []),
            str(len(record.rounds)),
            format_seconds(median(seconds)),
            f"({format_seconds(min(seconds))} .. {format_seconds(max(seconds))})",
            *([] if is_load else [format_seconds(record.stall_s)]),
            *(_cost(record) if trained else []),
            three_digits(record.throughput_Bps / 1e9),
            first,
        )
    buffer = io.StringIO()
    Console(file=buffer, width=max(width, 200), color_system=None, markup=False, emoji=False).print(table)
    return [line.rstrip() for line in buffer.getvalue().splitlines() if line.strip()]


def _cost(record: SaveRecord) -> list[str]:
    """Return how much longer training's steps took meanwhile, and what the save cost it: stall and lost seconds."""
    slowdowns = [r.train_slowdown for r in record.rounds if r.train_slowdown is not None]
    costs = [r.effective_cost_s for r in record.rounds if r.effective_cost_s is not None]
    slower = f"{100 * (median(slowdowns) - 1):+.0f} %" if slowdowns else "stood still"
    return [slower, format_seconds(median(costs)) if costs else "-"]


def _options(record: SaveRecord) -> str:
    """Return the options of the writer: by how many ranks a load's checkpoint was saved has its own column."""
    options = record.scenario.options
    return options_text({k: v for k, v in options.items() if not (record.scenario.is_load and k == "saved_ranks")})
