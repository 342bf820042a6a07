"""Which scenario a figure belongs to: the same wherever it was measured, and in what two of them differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from pytest_ckpt.records import Scenario

PATH = "<path>"
"""Stands for an option's value that is a path: where something lies is no part of what is saved."""


class Difference(msgspec.Struct, frozen=True):
    """A fact that differs, by its name as in the record: `world_size`, `options.thread_count`, `cpus`."""

    name: str
    here: Any
    there: Any

    def __str__(self) -> str:
        return f"{self.name} is {_shown(self.here)}, there {_shown(self.there)}"


def canonical(scenario: Scenario) -> Scenario:
    """Return the scenario as it is stored and compared: without paths among its options."""
    return msgspec.structs.replace(scenario, options=_without_paths(msgspec.to_builtins(scenario.options)))


def full_key(scenario: Scenario) -> str:
    """Return a text that is equal for equal scenarios and only for them."""
    return json.dumps(msgspec.to_builtins(canonical(scenario)), sort_keys=True)


def short_key(scenario: Scenario) -> str:
    """Return eight characters that name the scenario on a command line."""
    return hashlib.sha256(full_key(scenario).encode()).hexdigest()[:8]


def differences(here: msgspec.Struct | None, there: msgspec.Struct | None) -> list[Difference]:
    """Return the fields in which two records of one kind differ, in the order of the kind."""
    return _compare("", _plain(here), _plain(there))


def _plain(record: msgspec.Struct | None) -> dict[str, Any]:
    if isinstance(record, Scenario):
        record = canonical(record)
    plain: dict[str, Any] = msgspec.to_builtins(record) if record is not None else {}
    return plain


def _compare(prefix: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> list[Difference]:
    found = []
    for name in dict.fromkeys([*here, *there]):
        ours, theirs = here.get(name), there.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            found += _compare(f"{prefix}{name}.", ours, theirs)
        elif ours != theirs:
            found.append(Difference(prefix + name, ours, theirs))
    return found


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_paths(inner) for inner in value]
    return PATH if isinstance(value, str) and ("/" in value or "\\" in value) else value


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
