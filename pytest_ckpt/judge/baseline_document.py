"""What of a result goes into a baseline: the figures and what they depend on, and nothing that names a person or host.

A baseline is committed, often in public. Of pytest-benchmark's part, what may stay is listed here; of our record, what
may not, and a test lists all its fields, so that a new one is decided on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pytest_ckpt.judge.baseline_file import HEAD, Head
from pytest_ckpt.judge.result_rows import Row
from pytest_ckpt.judge.scenarios import canonical
from pytest_ckpt.records import SaveRecord, to_plain

_MACHINE = ("system", "release", "machine", "processor", "python_implementation", "python_version")
_CPU = ("brand_raw", "arch", "bits", "count")
_COMMIT = ("id", "time", "dirty")
_OPTIONS = ("disable_gc", "timer", "min_rounds", "max_time", "min_time", "warmup")
LEFT_OUT = ("findings", "other_volumes", "notes", "verdicts")
"""Fields of a record that judge nothing; the words in them may name paths."""
_UNREADABLE = "UNSERIALIZABLE"
"""What pytest-benchmark writes for an object: its repr follows, path and all."""

Hash = Callable[[str], str]


def baseline_document(document: dict[str, Any], rows: Sequence[Row], head: Head, hash_name: Hash) -> dict[str, Any]:
    """Return the document that is stored of `rows`; `hash_name` gives what stands for the name of a host."""
    machine = _mapping(document.get("machine_info"))
    names = {str(machine.get("node") or "")} | {row.record.host for row in rows}
    hide = _Names(names, hash_name)
    node = rows[0].record.host
    return {
        "benchmarks": [_benchmark(row, head.hardware_id, hide) for row in rows],
        HEAD: msgspec.to_builtins(head),
        "commit_info": _plain(document.get("commit_info"), _COMMIT),
        "datetime": str(document.get("datetime") or ""),
        "machine_info": {**_plain(machine, _MACHINE), "cpu": _plain(machine.get("cpu"), _CPU), "node": hash_name(node)},
        "version": str(document.get("version") or ""),
    }


class _Names:
    """Takes host names and paths out of what people read: names of tests, groups and parameters."""

    def __init__(self, hosts: set[str], hash_name: Hash) -> None:
        self.hash = hash_name
        given = {name for host in hosts for name in (host, host.partition(".")[0]) if name}
        by_length = sorted(given, key=lambda name: (-len(name), name))
        self._pattern = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, by_length))})(?![\w.])") if given else None

    def __call__(self, text: str) -> str:
        """Return `text` with hashes in place of host names, and of itself where it is a path."""
        if "/" in text or "\\" in text:
            return self.hash(text)
        return self._pattern.sub(lambda match: self.hash(match[0]), text) if self._pattern else text

    def test(self, name: str) -> str:
        """Return the name of a test, `file::test[parameters]` or without the file."""
        file, colons, test = name.rpartition("::") if "[" not in name else _split(name)
        function, bracket, parameters = test.partition("[")
        if "/" in parameters or "\\" in parameters:
            inner, closing, rest = parameters.rpartition("]")
            parameters = self.hash(inner or rest) + closing + (rest if closing else "")
        parts = file.replace("\\", "/").split("/")
        if file.startswith(("/", "~")) or ".." in parts or ":" in parts[0]:
            parts = parts[-1:]
        return "/".join(map(self, parts)) + colons + self(function) + bracket + self(parameters)


def _split(name: str) -> tuple[str, str, str]:
    before, bracket, parameters = name.partition("[")
    file, colons, function = before.rpartition("::")
    return file, colons, function + bracket + parameters


def _benchmark(row: Row, hardware_id: str, hide: _Names) -> dict[str, Any]:
    raw = row.raw
    params = raw.get("params")
    return {
        "extra_info": {"ckpt": _record(row.record, hardware_id, hide)},
        "fullname": hide.test(str(raw.get("fullname") or "")),
        "group": _group(raw, hide) + row.group,
        "name": hide.test(str(raw.get("name") or "")),
        "options": _plain(raw.get("options"), _OPTIONS),
        "param": hide(raw["param"]) if _is_label(raw.get("param")) else None,
        "params": None if params is None else _parameters(_mapping(params), hide),
        "stats": {**_plain(raw["stats"], [key for key in raw["stats"] if key != "data"]), "data": row.seconds},
    }


def _group(raw: dict[str, Any], hide: _Names) -> str:
    own, space, _ = str(raw.get("group")).rpartition(" ")
    return hide(own) + space


def _parameters(params: dict[str, Any], hide: _Names) -> dict[str, Any]:
    return {
        name: hide(value) if isinstance(value, str) else value
        for name, value in params.items()
        if name.startswith("ckpt_") and (_is_label(value) or type(value) is int)
    }


def _is_label(value: Any) -> bool:
    return isinstance(value, str) and not value.startswith(_UNREADABLE) and "/" not in value and "\\" not in value


def _record(record: SaveRecord, hardware_id: str, hide: _Names) -> dict[str, Any]:
    replace = msgspec.structs.replace
    kept = replace(
        record,
        scenario=canonical(record.scenario),
        host=hide.hash(record.host),
        hardware_id=hardware_id,
        target=replace(record.target, label=hide(record.target.label), mount="", storage_rule=""),
        rounds=[replace(taken, ranks=[]) for taken in record.rounds],
        probes=replace(record.probes, details=[]) if record.probes else None,
        efficiency=record.efficiency or None,  # of a bound that no probe gave
    )
    return {name: value for name, value in to_plain(kept).items() if name not in LEFT_OUT}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _plain(value: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return those of the names whose values are single ones, and no paths."""
    found = {name: inner for name, inner in _mapping(value).items() if name in names}
    return {
        name: inner
        for name, inner in found.items()
        if inner is None or isinstance(inner, bool | int | float) or (isinstance(inner, str) and "/" not in inner)
    }
