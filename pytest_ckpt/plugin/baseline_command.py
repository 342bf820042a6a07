"""`pytest-ckpt baseline`: baselines that are added from result files, replaced on purpose, and listed."""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pytest_ckpt.errors import SettingError, unknown_name
from pytest_ckpt.judge.history import Point, csv_lines, history
from pytest_ckpt.judge.result_rows import Row, UnusableRows, rows_of
from pytest_ckpt.judge.scenarios import short_key
from pytest_ckpt.judge.store import Store, Stored
from pytest_ckpt.judge.verdict import LEAST_ROUNDS
from pytest_ckpt.records import SaveRecord, Scenario
from pytest_ckpt.units import format_seconds, three_digits

FOLDER = "baselines"
_HARDWARE = re.compile(r"(?:(?P<label>[A-Za-z0-9_-]+)=)?(?P<id>[^=]+)")
_SHOWN = {"model", "params", "world_size", "mode", "writer"}
"""Fields of a scenario that have a column, or follow from one."""


def add_parser(verbs: Any) -> None:
    """Add the verb to the command's parser."""
    baseline = verbs.add_parser("baseline", help="add, replace and list what later runs are judged against")
    kinds = baseline.add_subparsers(dest="kind", required=True, metavar="add|replace|list")

    adding = kinds.add_parser("add", help="add what a run measured, from its result file and without a rerun")
    adding.add_argument(
        "--example", action="store_true", help="show what a baseline looks like; no run is judged by it"
    )
    replacing = kinds.add_parser("replace", help="the same after an intended change: judge by nothing older than this")
    replacing.set_defaults(example=False)
    for parser, replaces in ((adding, False), (replacing, True)):
        parser.add_argument(
            "file", metavar="RUN.json", help="a file of --benchmark-json, or .pytest_cache/d/ckpt/last.json"
        )
        parser.add_argument("--reason", required=True, metavar="TEXT", help="why; it is kept in the file")
        parser.add_argument("--dir", default=FOLDER, metavar="DIR", help=f"folder of the baselines; default: {FOLDER}")
        parser.add_argument(
            "--hardware", action="append", default=[], metavar="[LABEL=]ID",
            help="hardware id to keep it under, of the target LABEL or of all; default: as the run found it",
        )  # fmt: skip
        parser.add_argument("--force", action="store_true", help="also what a verdict calls regressed")
        parser.set_defaults(do=_add, replaces=replaces)

    listing = kinds.add_parser("list", help="show what is stored, and what there cannot be used")
    listing.add_argument("id", nargs="?", metavar="ID", help="one hardware id; default: all")
    listing.add_argument("--dir", default=FOLDER, metavar="DIR", help=f"folder of the baselines; default: {FOLDER}")
    listing.add_argument(
        "--csv", action="store_true", help="a line for each run and scenario, as Apache Otava reads it"
    )
    listing.add_argument("--scenario", metavar="KEY", help="only this one, by its key or number in the list")
    listing.set_defaults(do=_list)


def _add(options: argparse.Namespace) -> int:
    if not options.reason.strip():
        raise SettingError("'' (from --reason) gives no reason; write why these figures are what is to be expected")
    document, by_label = _read(Path(options.file))
    forced_ids = _hardware_ids(options.hardware, by_label)
    store = Store(Path(options.dir))
    where = {}
    for label, rows in by_label.items():
        for row in rows:
            _require_sound(row.record, options.force)
        where[label] = hardware_id = forced_ids.get(label) or _found_id(label, rows, options.file)
        store.require_new(hardware_id, rows[0].record.session, label)  # before anything is written
    for label, hardware_id in where.items():
        path = store.add(
            document,
            hardware_id,
            label=label,
            reason=options.reason,
            replaces=options.replaces,
            example=options.example,
        )
        scenarios = len({short_key(row.record.scenario) for row in by_label[label]})
        print(f"{path}: {scenarios} scenario{'s' * (scenarios > 1)} of target {label}{_effect(options)}")
    return 0


def _effect(options: argparse.Namespace) -> str:
    if options.example:
        return ", an example"
    return ", in place of what was before" if options.replaces else ""


def _read(path: Path) -> tuple[dict[str, Any], dict[str, list[Row]]]:
    """Return a result file, and its rows by the label of their target."""
    try:
        document = json.loads(path.read_bytes())
        rows = rows_of(document)
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror}; give a result file") from None
    except UnusableRows as error:
        raise SettingError(f"{path} {error}; give a result file of this version") from None
    except (ValueError, RecursionError) as error:
        raise SettingError(f"{path} is no JSON ({type(error).__name__}: {error}); give a result file") from None
    if not rows:
        raise SettingError(f"{path} holds no checkpoint saves; give the file of a run that saved")
    by_label = defaultdict(list)
    for row in rows:
        by_label[row.record.target.label].append(row)
    return document, dict(by_label)


def _require_sound(record: SaveRecord, force: bool) -> None:
    what = f"{record.scenario.model} r{record.scenario.world_size} {record.scenario.mode} on {record.target.label}"
    if len(record.rounds) < LEAST_ROUNDS:
        raise SettingError(
            f"{what} has {len(record.rounds)} rounds, too few to judge by; measure with --ckpt-rounds={LEAST_ROUNDS} "
            "or more"
        )
    for verdict in record.verdicts if not force else ():
        if verdict.outcome == "regressed":
            why = verdict.text.strip().rstrip(".") or f"its {verdict.metric} against {verdict.source or 'the baseline'}"
            raise SettingError(f"{what} has regressed ({why}); write --force to make this what is expected")


def _hardware_ids(given: Sequence[str], labels: Iterable[str]) -> dict[str, str]:
    """Return the ids from --hardware by label; one without a label is for all that have none of their own."""
    found = {}
    for text in given:
        match = _HARDWARE.fullmatch(text)
        if match is None:
            raise SettingError(f"{text!r} (from --hardware) is no [LABEL=]ID; write as in nvme=my-machine-nvme")
        if match["label"] is not None and match["label"] not in labels:
            raise unknown_name("target", match["label"], labels, "--hardware")
        found[match["label"]] = match["id"]
    return {label: found[label] if label in found else found[None] for label in labels if found.keys() & {label, None}}


def _found_id(label: str, rows: Sequence[Row], file: str) -> str:
    found = {row.record.hardware_id for row in rows}
    if len(found) > 1 or "" in found:
        raise SettingError(
            f"{file} does not tell one hardware id for target {label}; write --hardware={label}=ID with the one to "
            "keep it under"
        )
    return found.pop()


def _list(options: argparse.Namespace) -> int:
    store = Store(Path(options.dir))
    if not store.folder.is_dir():
        raise SettingError(f"there is no folder {options.dir} of baselines (from --dir); give the one that has them")
    ids = store.ids()
    if options.id is not None and options.id not in ids:
        raise unknown_name("hardware id", options.id, ids, f"pytest-ckpt baseline list, in {options.dir}")
    listed = [store.read(hardware_id) for hardware_id in (ids if options.id is None else [options.id])]
    chosen = _chosen(listed, options.scenario)
    points = [[history(stored, scenario) for _, scenario in held] for stored, held in chosen]
    damaged = [(store.folder / stored.hardware_id / one.file, one) for stored in listed for one in stored.damaged]
    if options.csv:
        print("\n".join(csv_lines(point for of_id in points for of_scenario in of_id for point in of_scenario)))
    else:
        for (stored, held), of_id in zip(chosen, points, strict=True):
            print("\n".join(_table(stored, held, of_id)))
        if not ids:
            print(f"no baselines in {options.dir}")
    for path, one in damaged:
        print(f"cannot be used: {path}: {one.problem}", file=sys.stderr if options.csv else sys.stdout)
    return 0


_Numbered = list[tuple[int, Scenario]]


def _chosen(listed: Sequence[Stored], wanted: str | None) -> list[tuple[Stored, _Numbered]]:
    """Return what to show of each id: its scenarios with the number that the whole list gives them."""
    number = 0
    chosen = []
    known = []
    for stored in listed:
        held = []
        for scenario in stored.scenarios(examples=True):
            number += 1
            known.append(short_key(scenario))
            if wanted in (None, str(number), known[-1]):
                held.append((number, scenario))
        if held or wanted is None:
            chosen.append((stored, held))
    if wanted is not None and not chosen:
        raise unknown_name("scenario", wanted, dict.fromkeys(known), "--scenario")
    return chosen


def _table(stored: Stored, held: _Numbered, points: list[list[Point]]) -> list[str]:
    from rich.console import Console
    from rich.table import Table

    varying = _varying([scenario for _, scenario in held])
    table = Table(box=None, pad_edge=False, header_style="")
    for heading in ("", "key", "model"):
        table.add_column(heading, no_wrap=True)
    table.add_column("ranks", justify="right")
    for heading in ["mode", "writer", *(["besides"] if varying else [])]:
        table.add_column(heading, no_wrap=True)
    for heading in ("sessions", "hosts", "save", "stall", "GB/s", "newest"):
        table.add_column(heading, justify="right", no_wrap=True)
    for (number, scenario), over_time in zip(held, points, strict=True):
        current = {entry.file for entry in stored.current(scenario)}
        judging = [point for point in over_time if current & set(point.file.split())]
        besides = ", ".join(f"{name}={getattr(scenario, name)}" for name in varying)
        table.add_row(
            str(number),
            short_key(scenario),
            scenario.model,
            str(scenario.world_size),
            scenario.mode,
            scenario.writer,
            *([besides] if varying else []),
            *_figures(judging or over_time, None if judging else "example"),
        )
    buffer = io.StringIO()
    Console(file=buffer, width=400, color_system=None, markup=False, emoji=False).print(table)
    lines = [line.rstrip() for line in buffer.getvalue().splitlines() if line.strip()]
    return [stored.hardware_id, *(f"  {line}" for line in (lines if held else ["nothing that can be used"]))]


def _figures(points: Sequence[Point], instead_of_count: str | None) -> list[str]:
    """Return the last columns; figures are those of the newest run."""
    newest = points[-1]
    return [
        instead_of_count or str(len(points)),
        str(len({point.host for point in points})),
        format_seconds(newest.save_s),
        format_seconds(newest.stall_s),
        three_digits(newest.throughput_Bps / 1e9),
        newest.time[:10],
    ]


def _varying(scenarios: Sequence[Scenario]) -> list[str]:
    """Return the fields without a column in which these scenarios differ."""
    plain = [msgspec.to_builtins(scenario) for scenario in scenarios]
    return [
        name
        for name in Scenario.__struct_fields__
        if name not in _SHOWN and any(one[name] != plain[0][name] for one in plain)
    ]
