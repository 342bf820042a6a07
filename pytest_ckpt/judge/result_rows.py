"""The rows of a pytest-benchmark document that hold checkpoint records, typed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from pytest_ckpt.judge.scenarios import full_key
from pytest_ckpt.records import FORMAT, Probes, SaveRecord, from_plain

_MEASURED = ("save_s", "stall_s", "throughput_Bps")
_LARGEST = 1e18
"""An exabyte, and the age of the universe in seconds."""
_RATES = [name for name in Probes.__struct_fields__ if name.endswith("_Bps")]


class Row(NamedTuple):
    """One row: as it stands in the document, and what it holds."""

    raw: dict[str, Any]
    record: SaveRecord
    is_stall: bool
    """Its seconds are those in which training was blocked; else those of the save or load."""

    @property
    def group(self) -> str:
        """What its group ends in: `save`, `stall`, `load` or `plan`."""
        return "stall" if self.is_stall else self.record.scenario.kind

    @property
    def seconds(self) -> list[float]:
        """What the row times, one value for each round."""
        return [taken.stall_s if self.is_stall else taken.save_s for taken in self.record.rounds]


class UnusableRows(ValueError):
    """A document whose rows cannot be used; the message says why, as a clause that follows `it`."""


def rows_of(document: Any) -> list[Row]:
    """Return the rows that hold records, as their figures can be used; `UnusableRows` where they cannot.

    Other rows of the same document are left out.
    """
    benchmarks = document.get("benchmarks") if isinstance(document, dict) else None
    if not isinstance(benchmarks, list):
        raise UnusableRows("is no file of pytest-benchmark: it has no list `benchmarks`")
    rows = []
    for number, raw in enumerate(benchmarks, start=1):
        info = raw.get("extra_info") if isinstance(raw, dict) else None
        if isinstance(info, dict) and "ckpt" in info:
            row = _row(number, raw, info["ckpt"])
            _check(number, row)
            rows.append(row)
    return rows


def _row(number: int, raw: dict[str, Any], plain: Any) -> Row:
    if isinstance(plain, dict) and isinstance(plain.get("format"), int) and plain["format"] > FORMAT:
        raise UnusableRows(
            f"was written by a newer pytest-ckpt: row {number} has format {plain['format']}, this one reads {FORMAT}"
        )
    try:
        record = from_plain(plain)
        full_key(record.scenario)
    except msgspec.ValidationError as error:
        raise UnusableRows(f"holds in row {number} what is no record of a save ({error})") from None
    except UnicodeError:
        raise UnusableRows(f"holds in row {number} characters that no text has") from None
    except RecursionError:
        raise UnusableRows(f"is nested too deeply in row {number}") from None
    kind = str(raw.get("group")).rpartition(" ")[2]
    if kind not in ("save", "stall", "load", "plan"):
        raise UnusableRows(f"holds in row {number} a group that ends in none of `save`, `stall`, `load` and `plan`")
    if record.scenario.kind != ("save" if kind == "stall" else kind):
        raise UnusableRows(f"holds in row {number} mode `{record.scenario.mode}` in the group `{kind}`")
    return Row(raw, record, kind == "stall")


def _check(number: int, row: Row) -> None:
    record = row.record
    if not record.rounds:
        raise UnusableRows(f"holds no round in row {number}")
    figures: list[tuple[str, float | None]] = [
        (name, getattr(taken, name)) for taken in record.rounds for name in _MEASURED
    ]
    figures += [("efficiency", record.efficiency or None)]
    if record.probes is not None:
        figures += [(name, getattr(record.probes, name)) for name in _RATES]
    for number_held in _numbers(row.raw["extra_info"]["ckpt"]):
        if abs(number_held) > _LARGEST:
            raise UnusableRows(f"holds in row {number} a number that nothing here measures: more than {_LARGEST:.0e}")
    for name, value in figures:
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UnusableRows(f"holds in row {number} a `{name}` of {value}, where only figures above zero can be")
    stats = row.raw.get("stats")
    if not isinstance(stats, dict):
        raise UnusableRows(f"has no `stats` in row {number}")
    if stats.get("data", row.seconds) != row.seconds:
        raise UnusableRows(f"has in row {number} a `stats.data` that is not that of the record's rounds")


def _numbers(value: Any) -> Iterator[float]:
    """Yield every number in plain data; of integers too large for a float, infinity."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from _numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value if isinstance(value, float) or abs(value) < 2**63 else math.inf
