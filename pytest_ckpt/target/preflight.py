"""Try, with a few bytes, what a save will ask of a file system, before hours are spent on finding out."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from pytest_ckpt.errors import SettingError

_BYTES = b"pytest-ckpt was here\n"


def preflight(folder: str) -> None:
    """Make, write, sync, rename, read back and delete a file and a folder inside `folder`.

    `SettingError` names the first operation that was refused and its errno. What was made by then is left for
    the caller, who removes `folder` anyway.
    """
    first, second = os.path.join(folder, "preflight.tmp"), os.path.join(folder, "preflight")
    with attempt("create a file", folder):
        fd = os.open(first, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with attempt("write", folder):
            os.write(fd, _BYTES)
        with attempt("fsync", folder):
            os.fsync(fd)
    finally:
        with attempt("close a file", folder):
            os.close(fd)
    with attempt("rename", folder):
        os.rename(first, second)
    with attempt("read back", folder):
        with open(second, "rb") as file:
            found = file.read()
        if found != _BYTES:
            raise OSError(errno.EIO, f"{len(_BYTES)} bytes were written and {len(found)} others read")
    with attempt("delete a file", folder):
        os.unlink(second)
    with attempt("mkdir", folder):
        os.mkdir(first)
    with attempt("delete a folder", folder):
        os.rmdir(first)


@contextmanager
def attempt(operation: str, location: str) -> Iterator[None]:
    """Turn an `OSError` inside into a `SettingError` that names the operation, the place and the errno."""
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "unknown error")
        raise SettingError(
            f"target {os.path.dirname(location)} refuses to {operation} ({name}: {error.strerror}), so no "
            "checkpoint can be saved there; choose another --ckpt-target or mend its mount"
        ) from error
