"""Read targets as people write them: `[LABEL=]PATH`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_ckpt.errors import SettingError

_LABEL = re.compile(r"[A-Za-z0-9_-]+")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class TargetSpec:
    """A target as asked for: its label, its absolute location, the place as written, and who wrote it."""

    label: str
    location: str
    given: str = ""
    source: str = "the default"


def parse_target(text: str, source: str) -> TargetSpec:
    """Return the target that `text`, which came from `source`, names; `SettingError` where it names none.

    `~` is expanded and a relative path made absolute; links are left for the target itself to resolve.
    Without a label, the label is a slug of the path's last component.
    """
    head, equals, tail = text.partition("=")
    labelled = bool(equals) and "/" not in head
    given = tail if labelled else text
    if labelled and not _LABEL.fullmatch(head):
        hint = f"{slug(head, 'LABEL')}={tail or 'PATH'}"
        raise _malformed(text, source, "a label is letters, digits, _ and -", hint)
    if not given.strip():
        raise _malformed(text, source, "the path is missing", f"{head}=PATH" if labelled else "[LABEL=]PATH")
    if "\0" in given:
        raise _malformed(text, source, "a path holds no NUL byte", "[LABEL=]PATH")
    if _URL.match(given):
        raise _malformed(text, source, "object stores by URL are not supported yet", "the path of a folder")
    expanded = os.path.expanduser(given)
    if expanded.startswith("~"):
        raise _malformed(text, source, "there is no such user", f"./{given} if a folder of that name is meant")
    # Not normalised: behind a link, `..` is another folder than its spelling says.
    location = os.path.join(os.getcwd(), expanded)
    return TargetSpec(head if labelled else _default_label(location), location, given, source)


def parse_targets(texts: Sequence[tuple[str, str]]) -> list[TargetSpec]:
    """Return the targets of (text, source) pairs in their order; `SettingError` where two share a label."""
    by_label: dict[str, TargetSpec] = {}
    for text, source in texts:
        spec = parse_target(text, source)
        first = by_label.setdefault(spec.label, spec)
        if first is not spec:
            raise SettingError(
                f"two targets are labelled {spec.label!r}: {first.given!r} (from {first.source}) and "
                f"{spec.given!r} (from {spec.source}); write LABEL=PATH, as in {spec.label}-2={spec.given}"
            )
    return list(by_label.values())


def slug(text: str, fallback: str) -> str:
    """Return `text` with every run of other characters than letters, digits, `_`, `-` as one `-`."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[:60] or fallback


def _default_label(location: str) -> str:
    name = os.path.basename(os.path.abspath(location))
    return slug(name, "target") if name else "root"


def _malformed(text: str, source: str, reason: str, instead: str) -> SettingError:
    return SettingError(f"target {text!r} (from {source}) cannot be used: {reason}; write {instead}")
