"""How many runs in a row a scenario stayed undecided: kept in pytest's cache, from run to run."""

from __future__ import annotations

from typing import ClassVar

import pytest

_KEY = "ckpt/undecided"


class UndecidedRuns:
    """Counts them; where pytest's cache is off or thrown away, it counts from one."""

    SAID: ClassVar[int] = 3
    """From this many on it is said."""

    def __init__(self, config: pytest.Config) -> None:
        self._cache = getattr(config, "cache", None)

    def note(self, key: str, undecided: bool) -> int:
        """Note how a scenario ended, and return in how many runs in a row it has been undecided now."""
        if self._cache is None:
            return int(undecided)
        counts = self._cache.get(_KEY, {})
        counts = counts if isinstance(counts, dict) else {}
        before = counts.get(key, 0)
        count = before + 1 if undecided and isinstance(before, int) else int(undecided)
        if count or key in counts:
            self._cache.set(_KEY, {**{k: v for k, v in counts.items() if k != key}, **({key: count} if count else {})})
        return count
