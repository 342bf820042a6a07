"""Where the time went, what bounds the save and what to do, as lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from pytest_ckpt.errors import SettingError
from pytest_ckpt.judge.bounds import place_between
from pytest_ckpt.judge.findings import phase_medians
from pytest_ckpt.records import Finding, Probe, RankRound, SaveRecord, from_plain
from pytest_ckpt.units import format_bytes, format_rate, format_seconds

_LEAST_SHARE = 0.03
_MOST_PHASES = 6


def explain_lines(record: SaveRecord, *, name: str | None = None, verbose: bool = False) -> list[str]:
    """Return the lines that explain one record, four at most; `verbose` adds all there is.

    They say where the time went, what bounds the save, what to do, and what else was found. A fifth says what each rank
    writes, where the ranks are no plain full shard.
    """
    if record.scenario.is_plan and not verbose:  # its steps stand in the table
        return [f"{name or _scenario(record)}: {v.text}" for v in record.verdicts if v.outcome != "no baseline"]
    lines = [f"{name or _scenario(record)}: {_phases(record, verbose)}"]
    if verbose or record.scenario.layout:
        lines += _indented(_bytes_per_rank(record))
    if verbose:
        lines += _indented(_bounds(record), _probes(record))
    main = next((finding for finding in record.findings if finding.id == record.bottleneck), None)
    others = [f for f in record.findings if f is not main and (verbose or f.severity != "info")]
    if main is None:
        lines += _indented(_no_bottleneck(record) if record.scenario.is_save else "")
        if len(others) == 1 or verbose:
            lines += _told(others)
        else:
            lines += _indented(_named(others))
    else:
        lines += _told([main]) if verbose or main.severity != "info" else _indented(main.text)
        lines += _told(others) if verbose else _indented(_named(others))
    lines += _indented(*(v.text for v in record.verdicts if verbose or v.outcome != "no baseline"))
    if verbose:
        lines += _indented(*_ranks(record))
    return lines


def read_records(path: Path) -> list[tuple[str, SaveRecord]]:
    """Return (name, record) of each row of a result file that holds one; `SettingError` where it is none."""
    try:
        document: Any = json.loads(path.read_text())
        rows = [row for row in document["benchmarks"] if "ckpt" in row["extra_info"] and not _is_stall(row)]
        records = [(str(row["name"]), from_plain(row["extra_info"]["ckpt"])) for row in rows]
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror}; give a result file") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, msgspec.ValidationError) as error:
        raise SettingError(
            f"{path} is no result file of this version ({type(error).__name__}: {error}); give one that "
            "--benchmark-json wrote, or .pytest_cache/d/ckpt/last.json"
        ) from None
    if not records:
        raise SettingError(f"{path} holds no checkpoint saves; give a file of a run that saved")
    return records


def probe_words(probes: Iterable[Probe]) -> str:
    """Return the rates of `probes` in one line, and why one was refused."""
    return ", ".join(
        f"{probe.name} {format_rate(probe.Bps) if probe.Bps else f'refused ({probe.note})'}" for probe in probes
    )


def _is_stall(row: dict[str, Any]) -> bool:
    return str(row["group"]).rpartition(" ")[2] == "stall"


def _scenario(record: SaveRecord) -> str:
    scenario = record.scenario
    engine = "" if scenario.engine == "dcp" else f" {scenario.engine}"
    options = f" {scenario.options_text}" if scenario.options else ""
    layout = f" {scenario.layout}" if scenario.layout else ""
    return f"{record.target.label} {scenario.model} r{scenario.world_size}{layout} {scenario.mode}{engine}{options}"


def _phases(record: SaveRecord, verbose: bool) -> str:
    what = "planned" if record.scenario.is_plan else format_bytes(record.logical_bytes)
    done = f"{what} in {format_seconds(record.save_s)}"
    phases = sorted(phase_medians(record).items(), key=lambda item: -item[1])
    if not any(seconds for _, seconds in phases):
        return f"{done}, not traced"
    least = 0.0 if verbose else _LEAST_SHARE * record.save_s
    shown = [
        f"{name} {format_seconds(seconds)} ({_percent(seconds / record.save_s)})"
        for name, seconds in phases
        if seconds > least
    ]
    return f"where the time went ({done}): {', '.join(shown if verbose else shown[:_MOST_PHASES])}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.005 else "<1 %"


def _no_bottleneck(record: SaveRecord) -> str:
    phases = phase_medians(record)
    if not any(phases.values()):
        return ""
    largest = max(phases, key=lambda name: phases[name])
    share = _percent(phases[largest] / record.save_s)
    if largest == "other":
        return f"no single bottleneck: nothing that is measured explains the largest part, {share}"
    return f"no single bottleneck: the largest part is {largest}, {share}"


def _told(findings: Iterable[Finding]) -> list[str]:
    return [line for finding in findings for line in (f"  {finding.text}", f"    -> {finding.advice}")]


def _named(findings: list[Finding]) -> str:
    """Return the one other finding in its words, or the names of several."""
    if len(findings) == 1:
        return f"also {findings[0].text}"
    ids = ", ".join(finding.id for finding in findings)
    return f"also {ids}: -v or `pytest-ckpt explain -v` tells more" if ids else ""


def _indented(*lines: str) -> list[str]:
    return ["  " + line for line in lines if line]


def _bounds(record: SaveRecord) -> str:
    bounds = record.bounds
    if bounds is None:
        return ""
    place = place_between(bounds, record.save_s)
    if record.save_s > bounds.serial_s:
        lies = f"takes {record.save_s / bounds.serial_s:.2g} times the second"
    elif record.save_s < bounds.overlapped_s:
        lies = f"takes {record.save_s / bounds.overlapped_s:.2g} of the first"
    else:
        lies = f"lies {100 * place:.0f} % of the way from the first to the second"
    line = (
        f"bounds: {format_seconds(bounds.overlapped_s)} if all overlapped ({bounds.largest}), "
        f"{format_seconds(bounds.serial_s)} one step after the other; this save {lies}"
    )
    if record.efficiency is not None:
        line += f"; efficiency {100 * record.efficiency:.0f} %"
    return line


def _probes(record: SaveRecord) -> str:
    return f"probes: {probe_words(record.probes.details)}" if record.probes and record.probes.details else ""


def _bytes_per_rank(record: SaveRecord) -> str:
    """Return who writes how much: DCP has each replica written by one of the ranks that hold it."""
    planned = [rank.planned_bytes for rank in record.rounds[-1].ranks] if record.rounds else []
    known = [size for size in planned if size is not None]
    if not known or len(known) < len(planned):
        return ""
    least, middle, most = (format_bytes(size) for size in (min(known), median(known), max(known)))
    times = sum(known) / record.logical_bytes if record.logical_bytes else 0.0
    once = "each byte once" if sum(known) == record.logical_bytes else f"{times:.3g} times the state"
    total = f"over all ranks {format_bytes(sum(known))}, {once}"
    return f"bytes per rank: least {least}, median {middle}, most {most}; {total}"


def _ranks(record: SaveRecord) -> list[str]:
    """Return a line for each rank: medians over the rounds."""
    return [
        _rank(f"{number} on host {record.hosts[number]}" if record.hosts else str(number), list(rounds))
        for number, rounds in enumerate(zip(*_by_round(record), strict=False))
    ]


def _by_round(record: SaveRecord) -> list[list[RankRound]]:
    return [taken.ranks for taken in record.rounds]


def _rank(name: str, rounds: list[RankRound]) -> str:
    names = dict.fromkeys(name for own in rounds for name in own.phases)
    phases = {name: median(own.phases.get(name, 0.0) for own in rounds) for name in names}
    waited_for = dict.fromkeys(name for own in rounds for name in own.waits)
    waits = {name: median(own.waits.get(name, 0.0) for own in rounds) for name in waited_for}
    parts = [", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in phases.items())]
    if waits:
        parts.append("waited " + ", ".join(f"{format_seconds(s)} for rank {name}" for name, s in waits.items()))
    for title, show, values in (
        ("planned", format_bytes, [own.planned_bytes for own in rounds]),
        ("wrote", format_bytes, [own.item_bytes or None for own in rounds]),
        ("CPU", format_seconds, [own.cpu_s for own in rounds]),
        ("read from storage", format_bytes, [own.read_bytes for own in rounds]),
        ("peak memory +", format_bytes, [own.peak_rss_bytes for own in rounds]),
    ):
        parts.append(_median(title, show, values))
    return f"rank {name}: " + "; ".join(part for part in parts if part)


def _median(title: str, show: Callable[[float], str], values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{title}{'' if title.endswith('+') else ' '}{show(median(known))}" if known else ""
