"""What may stand anywhere in a file of others, and where."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

HOSTILE: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 0, 0.0, -1.5, 10**400, 1e308, 5e-324, "", "x", "2026", "\x1b[2J", "\ud800", [], [[]], {}, {"a": 1}]
) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
BIDI = [chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))]
"""Characters that turn the direction of writing."""


def steers(text: str) -> bool:
    """Return whether a terminal would do more than show `text`, or could not."""
    return any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in BIDI for c in text)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of keys to each value within `value`, itself included."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def put(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return the document with `value` at this path."""
    if not path:
        return value
    within = document
    for key in path[:-1]:
        within = within[key]
    within[path[-1]] = value
    return document
