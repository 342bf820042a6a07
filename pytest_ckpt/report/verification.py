"""What was found of a checkpoint, as lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from pytest_ckpt.records import Orphan, Problem, Verification
from pytest_ckpt.units import count, format_bytes

_SHOWN = 20


def verification_lines(found: Verification, *, verbose: bool = False) -> list[str]:
    """Return what is wrong, what is left over and what was read; the last line says what all of it means.

    `verbose`: every problem and orphan, not only the first 20.
    """
    most = None if verbose else _SHOWN
    lines = [_printable(f"checkpoint {found.location}{_size(found)}")]
    # The one that concerns no file in particular is all that the last line says.
    named = [problem for problem in found.problems if problem.file or problem.entry]
    lines += _shortened([_problem_line(problem.kind, problem) for problem in named], "problems", most)
    lines += _shortened([_problem_line("warning", warning) for warning in found.warnings], "warnings", most)
    lines += _orphan_lines(found.orphans, most)
    if found.read_bytes:
        lines.append(_cost(found))
    return [*lines, _printable(found.text)]


def verification_json(found: Verification) -> str:
    """Return all of it as JSON; names that are no UTF-8, as files may have, with their bytes written as `\\udcff`."""
    plain = {**msgspec.to_builtins(found), "is_complete": found.is_complete}
    return msgspec.json.format(msgspec.json.encode(_encodable(plain))).decode()


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {key: _encodable(one) for key, one in value.items()}
    return [_encodable(one) for one in value] if isinstance(value, list) else value


def _size(found: Verification) -> str:
    if not found.layout:
        return ""
    held = f"{count(found.tensors, 'tensor')} in {count(found.files, 'file')}"
    return f": {found.layout}, {held}, {format_bytes(found.stored_bytes)}"


def _problem_line(head: str, problem: Problem) -> str:
    named = " ".join(filter(None, (problem.file, problem.entry)))
    return _printable(f"  {head:<15} {named}{' ' * bool(named)}{problem.text}")


def _orphan_lines(orphans: Sequence[Orphan], most: int | None) -> list[str]:
    if not orphans:
        return []
    total = format_bytes(sum(orphan.bytes for orphan in orphans))
    lines = [_printable(f"  orphan          {orphan.file} ({format_bytes(orphan.bytes)})") for orphan in orphans]
    return [
        *_shortened(lines, "orphans", most),
        f"  {count(len(orphans), 'orphan')}, {total}: no part of this checkpoint, left by another save into it",
    ]


def _cost(found: Verification) -> str:
    share = math.floor(1000 * found.checked_bytes / found.read_bytes) / 10  # never "100 %" for less
    if not found.checked_bytes:
        covered = "no checksum covers any of it"
    elif found.is_complete:
        covered = f"checksums cover {share} % of it ({found.crc32}), and not the headers and padding between"
    else:
        covered = f"{share} % of it is equal to its checksums ({found.crc32})"
    source = ""
    if found.fetched_bytes is not None:
        fetched = min(found.fetched_bytes, found.read_bytes)
        source = f", {format_bytes(fetched)} of it from the storage and the rest from the page cache"
        if fetched == found.read_bytes:
            source = ", from the storage"
        elif fetched == 0:
            source = ", from the page cache"
    return f"  read {format_bytes(found.read_bytes)}{source}; {covered}"


def _shortened(lines: list[str], noun: str, most: int | None) -> list[str]:
    if most is None or len(lines) <= most:
        return lines
    return [*lines[:most], f"  ... and {len(lines) - most} more {noun} (--verbose shows all)"]


def _printable(text: str) -> str:
    """Return `text` with what a terminal would act on written out: names come from files that may be hostile."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)
