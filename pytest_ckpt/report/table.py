"""The summary table of a run, as lines."""

from __future__ import annotations

import io
from collections.abc import Sequence
from statistics import median

from pytest_ckpt.records import SaveRecord
from pytest_ckpt.units import format_seconds, three_digits

_DEFAULT_ENGINE = "dcp"
_DEFAULT_WRITER = "FileSystemWriter"


def summary_lines(rows: Sequence[tuple[str | None, SaveRecord]], width: int) -> list[str]:
    """Return a table with a line per (name, record); times are medians over the rounds, with least and greatest."""
    from rich.console import Console
    from rich.table import Table

    named = any(name for name, _ in rows)
    engines = len({record.scenario.engine for _, record in rows} | {_DEFAULT_ENGINE}) > 1
    writers = len({record.scenario.writer for _, record in rows} | {_DEFAULT_WRITER}) > 1
    options = any(record.scenario.options for _, record in rows)
    table = Table(box=None, pad_edge=False, header_style="")
    headings = [*(["name"] if named else []), "target", "model", "ranks", "mode"]
    headings += [*(["engine"] if engines else []), *(["writer"] if writers else []), *(["options"] if options else [])]
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    for heading in ("rounds", "save", "(min .. max)", "stall", "GB/s", "first save"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, record in rows:
        scenario = record.scenario
        saves = [r.save_s for r in record.rounds]
        first = format_seconds(record.first_save_s) if record.first_save_s is not None else "-"
        table.add_row(
            *([name or ""] if named else []),
            record.target.label,
            scenario.model,
            str(scenario.world_size),
            scenario.mode,
            *([scenario.engine] if engines else []),
            *([scenario.writer] if writers else []),
            *([scenario.options_text] if options else []),
            str(len(record.rounds)),
            format_seconds(median(saves)),
            f"({format_seconds(min(saves))} .. {format_seconds(max(saves))})",
            format_seconds(record.stall_s),
            three_digits(record.throughput_Bps / 1e9),
            first,
        )
    buffer = io.StringIO()
    Console(file=buffer, width=max(width, 120), color_system=None, markup=False, emoji=False).print(table)
    return [line.rstrip() for line in buffer.getvalue().splitlines() if line.strip()]
