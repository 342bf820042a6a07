"""The private folder of a spawned world: socket, store, status files, logs. It goes when the world goes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "ckpt-world-"
_LOCK = "lock"
_JUST_MADE_S = 60.0


class ScratchFolder:
    """A fresh folder, mode 0700, held by a lock that ends with this process."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        if len(base) > 60:  # Unix allows 108 bytes for the path of a socket
            base = "/tmp"
        _remove_those_of_killed_runs(Path(base))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_those_of_killed_runs(base: Path) -> None:
    """Delete folders whose lock nobody holds: a killed run cannot delete its own."""
    for path in base.glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if found.st_uid != os.getuid() or time.time() - found.st_mtime < _JUST_MADE_S:
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)  # it may not have got that far
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(lock)
