"""Bytes that files take and bytes that are left."""

from __future__ import annotations

import os
import stat

from pytest_ckpt.errors import CannotFit
from pytest_ckpt.units import format_bytes


def tree_bytes(location: str) -> int:
    """Return the sum of the apparent sizes, in bytes, of the regular files at `location`.

    As `du --apparent-size` has it, a file with several names counts once and links are not followed. What
    vanishes meanwhile counts nothing; `OSError` where `location` is not there or a folder cannot be read.
    """
    top = os.lstat(location)
    if not stat.S_ISDIR(top.st_mode):
        return _file_bytes(top)
    sizes: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(location, onerror=_raise_unless_gone):
        for name in names:
            try:
                found = os.lstat(os.path.join(folder, name))
            except FileNotFoundError:
                continue
            sizes[found.st_dev, found.st_ino] = _file_bytes(found)
    return sum(sizes.values())


def require_space(need_bytes: int, free_bytes: int, location: str, of: str = "the save", host: str = "") -> None:
    """Raise `CannotFit` with both figures where `need_bytes` are more than the `free_bytes` at `location`.

    `of` says what needs them, and `host` where the location is, if that is not this host.
    """
    if need_bytes > free_bytes:
        raise CannotFit(
            f"{of} needs {format_bytes(need_bytes)} and {location}{host} has {format_bytes(free_bytes)} free; "
            f"make room there (`pytest-ckpt clean {location}` removes what killed runs left), or choose "
            "another --ckpt-target or a smaller --ckpt-model"
        )


def _file_bytes(found: os.stat_result) -> int:
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
