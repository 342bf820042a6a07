"""What can go wrong, by who can mend it: the user's input, a rank, or the time that was allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CkptError(Exception):
    """Base of every error that pytest-ckpt raises on purpose."""


class SettingError(CkptError):
    """Input that cannot be used; the plugin turns it into `pytest.UsageError` (exit status 4).

    The message is one sentence with the value, where it came from and what to write instead.
    """


class CannotFit(SettingError):
    """The state does not fit the space or memory there is; raised before anything is written."""


class TargetVanished(CkptError):
    """The target is not what it was when the run began: unmounted, moved or replaced."""


class NothingSaved(CkptError):
    """A writer reported success and left nothing where it was told to write."""


class LoadDiffers(CkptError):
    """A load reported success, and the state holds something else than what was saved."""


class TooSlow(CkptError):
    """The rounds that a measurement needs do not fit the time allowed."""


def unknown_name(kind: str, name: str, known: Iterable[str], source: str) -> SettingError:
    """Return the error for a name that is not one of `known`, which it lists with the nearest first."""
    names = list(known)
    ranked = difflib.get_close_matches(name, names, n=len(names), cutoff=0.0)
    listed = ", ".join(ranked + [n for n in names if n not in ranked])
    return SettingError(f"unknown {kind} {name!r} (from {source}); known, nearest first: {listed}")
