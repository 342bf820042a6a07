"""Find what earlier runs left on a target, and remove what surely belongs to nobody any more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pytest_ckpt.errors import SettingError
from pytest_ckpt.target.interface import Leftover, LeftoverState
from pytest_ckpt.target.marker import BadMarker
from pytest_ckpt.target.space import tree_bytes
from pytest_ckpt.target.workfolder import MarkedFolder, has_folder_name


@dataclass(frozen=True)
class CleanResult:
    """What `clean` removed and what it left; the `detail` of each that it left says why."""

    removed: list[Leftover]
    left: list[Leftover]


def find_leftovers(target_path: str) -> list[Leftover]:
    """Return all work folders on the target, by name; `SettingError` where it cannot be listed."""
    found = []
    for path in _candidates(target_path):
        with _examined(path, exclusive=False) as (leftover, _):
            found.append(leftover)
    return found


def clean(target_path: str, include_kept: bool = False) -> CleanResult:
    """Delete the folders of killed runs and, where asked, kept ones; `SettingError` if it cannot be listed.

    A folder whose run lives or may live, and one without a valid marker of this user, is never deleted.
    """
    states: set[LeftoverState] = {"dead", "kept"} if include_kept else {"dead"}
    result = CleanResult([], [])
    for path in _candidates(target_path):
        with _examined(path, exclusive=True) as (leftover, held):
            if held is None or leftover.state not in states:
                result.left.append(leftover)
                continue
            try:
                held.delete()
            except OSError as error:
                result.left.append(replace(leftover, detail=f"could not be removed: {error}"))
            else:
                result.removed.append(leftover)
    return result


def _candidates(target_path: str) -> list[str]:
    target = os.path.realpath(target_path)
    try:
        with os.scandir(target) as entries:
            return sorted(
                entry.path for entry in entries if has_folder_name(entry.name) and entry.is_dir(follow_symlinks=False)
            )
    except OSError as error:
        raise SettingError(
            f"target {target_path!r} cannot be listed ({error.strerror}); write the path of a folder"
        ) from error


@contextmanager
def _examined(path: str, *, exclusive: bool) -> Iterator[tuple[Leftover, MarkedFolder | None]]:
    """Give what is known of a folder and, where its marker is valid, the folder itself, held meanwhile."""
    size = _readable_bytes(path)
    try:
        held = MarkedFolder.open(path, writable=exclusive)
    except BadMarker as reason:
        yield Leftover(path, size, None, "unreadable-marker", str(reason)), None
        return
    try:
        state, detail = held.judge(exclusive=exclusive)
        yield Leftover(path, size, held.marker.created, state, detail), held
    finally:
        held.release()


def _readable_bytes(path: str) -> int:
    try:
        return tree_bytes(path)
    except OSError:
        return 0
