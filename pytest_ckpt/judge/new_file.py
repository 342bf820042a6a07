"""New files in a folder that others write to at the same time: whole or not there, and never over another."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_POLL_S = 0.02


@contextmanager
def only_one(folder: Path, deadline_s: float) -> Iterator[None]:
    """Hold the folder's lock; `TimeoutError` where another holds it past the deadline.

    A file system without locks is used without: `write_new` alone still loses nothing.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + deadline_s
        while not _locked(descriptor):
            if time.monotonic() > deadline:
                raise TimeoutError("another run holds its lock")
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)  # and the lock with it


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # no locks here
    return True


def write_new(path: Path, data: bytes) -> None:
    """Make a file, durably; `FileExistsError` where one of that name is there."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(draft, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _publish(draft, path)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()
    _sync(path.parent)


def _publish(draft: Path, path: Path) -> None:
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.rename(draft, path)  # the folder's lock keeps others from taking the name in between


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # not every file system syncs folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
