"""Where the time went, what bounds the save and what to do, as lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from pytest_ckpt.errors import SettingError
from pytest_ckpt.judge.bounds import place_between
from pytest_ckpt.judge.findings import phase_medians
from pytest_ckpt.records import SaveRecord, from_plain
from pytest_ckpt.units import format_bytes, format_rate, format_seconds

_LEAST_SHARE = 0.02


def explain_lines(record: SaveRecord, *, verbose: bool = False) -> list[str]:
    """Return the lines that explain one record: phases, bottleneck and advice; `verbose` adds all there is."""
    lines = [_title(record)]
    if phases := _phases_line(record):
        lines.append("  " + phases)
    if bounds := _bounds_line(record):
        lines.append("  " + bounds)
    main = [finding for finding in record.findings if verbose or finding.severity != "info"]
    for finding in main:
        lines += [f"  {finding.text}", f"    -> {finding.advice}"]
    if verbose:
        lines += ["  " + line for line in _probe_lines(record) + _rank_lines(record)]
    return lines


def read_records(path: Path) -> list[tuple[str, SaveRecord]]:
    """Return (name, record) of each row of a result file that saves; `SettingError` where it is none."""
    try:
        document: Any = json.loads(path.read_text())
        rows = [row for row in document["benchmarks"] if "ckpt" in row["extra_info"] and row["group"] != "stall"]
        return [(row["name"], from_plain(row["extra_info"]["ckpt"])) for row in rows]
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror}; give a result file") from None
    except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise SettingError(
            f"{path} is no result file of this version ({type(error).__name__}: {error}); give one that "
            "--benchmark-json wrote, or .pytest_cache/d/ckpt/last.json"
        ) from None


def _title(record: SaveRecord) -> str:
    scenario = record.scenario
    return (
        f"{record.target.label} {scenario.model} r{scenario.world_size} {scenario.mode}: "
        f"{format_bytes(record.logical_bytes)} in {format_seconds(record.save_s)}, "
        f"{format_rate(record.throughput_Bps)}"
    )


def _phases_line(record: SaveRecord) -> str:
    phases = sorted(phase_medians(record).items(), key=lambda item: -item[1])
    shown = [
        f"{name} {format_seconds(seconds)} ({100 * seconds / record.save_s:.0f} %)"
        for name, seconds in phases
        if seconds >= _LEAST_SHARE * record.save_s
    ]
    return "where the time went (slowest rank): " + ", ".join(shown) if shown else ""


def _bounds_line(record: SaveRecord) -> str:
    bounds = record.bounds
    if bounds is None:
        return ""
    place = place_between(bounds, record.save_s)
    line = (
        f"bounds: {format_seconds(bounds.overlapped_s)} if all overlapped ({bounds.largest}), "
        f"{format_seconds(bounds.serial_s)} one step after the other; this save lies at {100 * place:.0f} % between"
    )
    if record.efficiency is not None:
        line += f", efficiency {100 * record.efficiency:.0f} %"
    return line


def _probe_lines(record: SaveRecord) -> list[str]:
    if record.probes is None:
        return []
    return [
        f"probe {probe.name}: {format_rate(probe.Bps) if probe.Bps else 'refused'}"
        + (f" ({probe.note})" if probe.note else "")
        for probe in record.probes.details
    ]


def _rank_lines(record: SaveRecord) -> list[str]:
    lines = []
    for number, taken in enumerate(record.rounds, 1):
        for rank, own in enumerate(taken.ranks):
            phases = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in own.phases.items())
            waited = ", ".join(f"{format_seconds(s)} for rank {r}" for r, s in own.waits.items())
            lines.append(
                f"round {number} rank {rank}: {phases}"
                + (f"; waited {waited}" if waited else "")
                + (f"; CPU {format_seconds(own.cpu_s)}" if own.cpu_s is not None else "")
                + (f"; peak memory +{format_bytes(own.peak_rss_bytes)}" if own.peak_rss_bytes is not None else "")
            )
    return lines
