"""The files of a checkpoint, opened so that neither a link nor a name in its metadata leads out of its folder."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import NamedTuple

from pytest_ckpt.errors import CkptError, SettingError


class NotThere(CkptError):
    """No file has that name."""


class LeadsOut(CkptError):
    """The name, or the link that it is, leads out of the folder, or to something that is no file."""


class Found(NamedTuple):
    """A file that was found in the folder."""

    bytes: int
    modified_ns: int


class CheckpointFolder:
    """A folder and what lies in it when this is made."""

    def __init__(self, location: str) -> None:
        """Raise `SettingError` where `location` is no folder that can be read; it may be a link to one."""
        if "://" in location:
            raise SettingError(
                f"{location!r} is a URL; verify reads a folder: copy the checkpoint, or mount its storage"
            )
        self.location = location
        self.path = os.path.realpath(location)
        if not os.path.isdir(self.path):
            kind = "is a file" if os.path.exists(self.path) else "does not exist"
            raise SettingError(f"{location!r} {kind}; give the folder of a checkpoint")
        self.files: dict[str, Found] = {}
        """Regular files by their names relative to the folder, those in folders below included."""
        self.others: set[str] = set()
        """Names of links, pipes and the like."""
        try:
            os.scandir(self.path).close()
        except OSError as error:
            raise SettingError(f"{location!r} cannot be read: {error.strerror}") from None
        for place, _, names in os.walk(self.path):
            for name in names:
                path = os.path.join(place, name)
                try:
                    status = os.lstat(path)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    self.files[os.path.relpath(path, self.path)] = Found(status.st_size, status.st_mtime_ns)
                else:
                    self.others.add(os.path.relpath(path, self.path))

    def resolve(self, name: str) -> str:
        """Return the path of the file that a metadata file calls `name`; `NotThere` or `LeadsOut`."""
        parts = PurePosixPath(name).parts
        if not name or "\0" in name or name.startswith("/") or ".." in parts:
            raise LeadsOut("leads out of the checkpoint's folder; it is not followed")
        try:
            path = os.path.realpath(os.path.join(self.path, name))
        except UnicodeEncodeError:
            raise NotThere("is a name that no file can have") from None
        if os.path.commonpath((path, self.path)) != self.path:
            raise LeadsOut("is a link out of the checkpoint's folder; it is not followed")
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            raise NotThere("is not there") from None
        if not stat.S_ISREG(mode):
            raise LeadsOut("is no regular file; it is not opened")
        return path

    @contextmanager
    def open(self, name: str) -> Iterator[int]:
        """Open the file `name` for reading and close it; `NotThere`, `LeadsOut` or `OSError`."""
        # Not blocking, in case that somebody puts a pipe there in between.
        descriptor = os.open(self.resolve(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def born_ns(self, name: str) -> int | None:
        """Return when the file `name` was made, as the file system keeps it; None where it does not."""
        return born_ns(self.resolve(name))


_STATX_BTIME = 0x800
_AT_FDCWD = -100


def born_ns(path: str) -> int | None:
    """Return the birth time of `path` in nanoseconds since 1970; None where libc or the file system has none.

    statx(2) by libc: `os.stat` tells it from Python 3.15 on. Of the 256 bytes, the mask is the first u32, and the birth
    time an s64 and a u32 at 80.
    """
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None:
        return None
    buffer = ctypes.create_string_buffer(256)
    if statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_BTIME, buffer) != 0:
        return None
    (mask,) = struct.unpack_from("=I", buffer, 0)
    seconds, nanoseconds = struct.unpack_from("=qI", buffer, 80)
    return int(seconds * 10**9 + nanoseconds) if mask & _STATX_BTIME else None
