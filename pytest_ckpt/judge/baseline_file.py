"""One file of a baseline: pytest-benchmark's JSON with a head of our own, written small and read with suspicion.

Whatever a file holds, reading it gives an `Entry` or a `Damaged` that says in one sentence what is wrong.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from pytest_ckpt.judge.result_rows import UnusableRows, rows_of
from pytest_ckpt.judge.scenarios import full_key
from pytest_ckpt.records import SaveRecord, Scenario

FORMAT = 1
HEAD = "ckpt_baseline"
LARGEST_BYTES = 64 * 2**20
_DEEPEST = 40
_LONGEST = 300
_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that steer a terminal, or that no text holds."""
_NAME = re.compile(r"(\d{4})_.+\.json")


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of itself, under `ckpt_baseline`."""

    format: int
    hardware_id: str
    session: str
    saved: str
    """When it was saved, ISO 8601 in UTC."""
    plugin: str
    """Version of pytest-ckpt that saved it."""
    reason: str | None
    replaces: bool
    """What was saved before is not judged against any more."""
    example: bool
    """Shows what a baseline looks like, and is not judged against."""
    hosts: int
    """On how many hosts the id's baseline stood when this file was saved, its own included."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What one file holds: the saves of one run into one target."""

    file: str
    number: int
    head: Head
    host: str
    """A salted hash of the host's name."""
    label: str
    """Of the target."""
    commit: str
    records: list[SaveRecord]

    @property
    def session(self) -> str:
        """The run's random name."""
        return self.head.session

    def holding(self, scenario: Scenario) -> list[SaveRecord]:
        """Return the records of `scenario`."""
        key = full_key(scenario)
        return [record for record in self.records if full_key(record.scenario) == key]


class Damaged(msgspec.Struct, frozen=True):
    """A file that is not judged against, and why."""

    file: str
    """Its name; `.` is the folder itself."""
    problem: str
    """A sentence of which the file is `it`."""


class _Problem(Exception):
    """What is wrong with a file."""


def render(document: dict[str, Any]) -> bytes:
    """Return the document as it is written: sorted keys and short lines, for a small diff."""
    return (json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def read_entry(path: Path, hardware_id: str) -> Entry | Damaged:
    """Return what the file holds, as a baseline of `hardware_id`."""
    try:
        return _parse(_read(path), path.name, hardware_id)
    except _Problem as problem:
        return _damaged(path.name, problem)


def parse_entry(data: bytes, name: str, hardware_id: str) -> Entry | Damaged:
    """Return what a file of this name would hold with these bytes."""
    try:
        return _parse(data, name, hardware_id)
    except _Problem as problem:
        return _damaged(name, problem)


def _damaged(name: str, problem: _Problem) -> Damaged:
    text = str(problem)
    return Damaged(name, text if len(text) < _LONGEST else f"{text[:_LONGEST]} ...")


def _read(path: Path) -> bytes:
    try:
        # No waiting for the other end of a pipe, and nothing from outside the folder.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _Problem("it is no regular file")
            data = file.read(LARGEST_BYTES + 1)
    except IsADirectoryError:
        raise _Problem("it is a folder; only files are read") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _Problem("it is a symbolic link; only files of the folder itself are read") from None
        raise _Problem(f"it cannot be read: {error.strerror}") from None
    if len(data) > LARGEST_BYTES:
        raise _Problem(f"it is larger than {LARGEST_BYTES >> 20} MiB, which no baseline is")
    return data


def _parse(data: bytes, name: str, hardware_id: str) -> Entry:
    named = _NAME.fullmatch(name)
    if named is None:
        raise _Problem("its name is not that of a baseline, NNNN_*.json; it is not judged against")
    document = _json(data)
    head = _head(document)
    if head.hardware_id != hardware_id:
        raise _Problem(f"it is a baseline of {head.hardware_id}, and lies in the folder of {hardware_id}")
    records = _records(document, head)
    commit = document.get("commit_info")
    return Entry(
        file=name,
        number=int(named[1]),
        head=head,
        host=records[0].host,
        label=records[0].target.label,
        commit=str(commit.get("id") or "") if isinstance(commit, dict) else "",
        records=records,
    )


def _json(data: bytes) -> Any:
    if not data.strip():
        raise _Problem("it is empty")
    try:
        document = json.loads(data.decode("utf-8"), parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise _Problem(f"it is no JSON, or cut off ({error.msg} in line {error.lineno})") from None
    except UnicodeDecodeError:
        raise _Problem("it is no text in UTF-8") from None
    except RecursionError:
        raise _Problem("it is nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise _Problem(f"it holds a number that cannot be read ({error})") from None
    _check_values(document)
    return document


def _no_number(name: str) -> None:
    raise _Problem(f"it holds {name}, which is no figure")


def _check_values(document: Any) -> None:
    """Refuse what JSON can hold and no baseline does: infinity, deep nesting, characters that steer a terminal."""
    waiting = [(document, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > _DEEPEST:
            raise _Problem("it is nested too deeply")
        if isinstance(value, dict):
            waiting += [(inner, depth + 1) for pair in value.items() for inner in pair]
        elif isinstance(value, list):
            waiting += [(inner, depth + 1) for inner in value]
        elif isinstance(value, str) and _STEERING.search(value):
            raise _Problem(f"it holds control characters: {value[:60]!a}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise _Problem("it holds a number that is too large")


def _head(document: Any) -> Head:
    plain = document.get(HEAD) if isinstance(document, dict) else None
    if plain is None:
        held = _try_rows(document)
        if held:
            raise _Problem(
                "it was saved by pytest-benchmark itself, which leaves host names and paths in it; "
                "`pytest-ckpt baseline add` makes a baseline of it"
            )
        raise _Problem("it is no baseline of checkpoint saves: it has no record of them")
    if isinstance(plain, dict) and isinstance(plain.get("format"), int) and plain["format"] > FORMAT:
        raise _Problem(
            f"it was written by a newer pytest-ckpt: it has format {plain['format']}, this one reads {FORMAT}"
        )
    try:
        head = msgspec.convert(plain, Head)
        saved = datetime.fromisoformat(head.saved)
    except (msgspec.ValidationError, ValueError) as error:
        raise _Problem(f"its `{HEAD}` cannot be used ({error})") from None
    if head.format != FORMAT or saved.utcoffset() != timedelta(0) or not head.session or head.hosts < 1:
        raise _Problem(f"its `{HEAD}` cannot be used (format, session, hosts, or a time that is not UTC)")
    return head


def _try_rows(document: Any) -> bool:
    try:
        return bool(rows_of(document))
    except UnusableRows:
        return False


def _records(document: Any, head: Head) -> list[SaveRecord]:
    try:
        rows = rows_of(document)
    except UnusableRows as error:
        raise _Problem(f"it {error}") from None
    if len(rows) != len(document["benchmarks"]):
        raise _Problem("it holds rows without a record of checkpoint saves")
    records = [row.record for row in rows if not row.is_stall]
    if not records:
        raise _Problem("it holds no checkpoint saves")
    told = {(row.record.session, row.record.hardware_id) for row in rows}
    if told != {(head.session, head.hardware_id)}:
        raise _Problem(f"its rows are not those of the run and the hardware that its `{HEAD}` names")
    if len({(row.record.target.label, row.record.host) for row in rows}) > 1:
        raise _Problem("it holds rows of several targets or hosts")
    return records
