"""The marker file by which a work folder is known as ours, and by which its run is known as alive."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from datetime import datetime, timezone
from typing import Literal

import msgspec

from pytest_ckpt.target.interface import LeftoverState

MARKER = ".pytest-ckpt"
_WRITTEN_BYTES = 1024
_MOST_BYTES = 4096
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """What a run writes about itself into its work folder; `pid_start` is in clock ticks since boot.

    `folder` is the name the folder was made under, so that a copy of it is not taken for the original.
    """

    format: Literal[1] = 1
    folder: str
    token: str
    uid: int
    host: str
    boot_id: str
    pid: int
    pid_start: int
    pid_namespace: int
    created: datetime
    state: Literal["running", "kept"] = "running"


class BadMarker(Exception):
    """A folder's marker is missing, hostile or not ours; the message says which."""


def new_marker(folder: str, token: str) -> Marker:
    """Return the marker of this process for the folder of that name."""
    return Marker(
        folder=folder,
        token=token,
        uid=os.geteuid(),
        host=os.uname().nodename,
        boot_id=_boot_id(),
        pid=os.getpid(),
        pid_start=_process_start(os.getpid()) or 0,
        pid_namespace=_pid_namespace(),
        created=datetime.now(timezone.utc),
    )


def create_marker(folder_fd: int, marker: Marker) -> int:
    """Write the marker into the folder and return its descriptor, which holds the lock until it is closed."""
    fd = os.open(MARKER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder_fd)
    try:
        # Locked before it is filled: an empty marker is no valid one, so nobody finds it valid and unlocked.
        take_lock(fd, exclusive=True)
        write_marker(fd, marker)
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_marker(fd: int, marker: Marker) -> None:
    """Write `marker` over what the open marker file holds; `OSError` where the file system refuses it."""
    # In place and always of one size, because a run that filled its disk must still be able to keep it.
    os.pwrite(fd, msgspec.json.encode(marker).ljust(_WRITTEN_BYTES), 0)
    os.fsync(fd)


def open_marker(folder_fd: int, folder: str, *, writable: bool) -> tuple[int, Marker]:
    """Return an open descriptor and the marker of the folder called `folder`; `BadMarker` if it is not ours.

    Locking it exclusively needs a `writable` one on NFS.
    """
    access = os.O_RDWR if writable else os.O_RDONLY
    try:
        # O_NONBLOCK, since opening a pipe that somebody put there would wait for ever.
        fd = os.open(MARKER, access | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_fd)
    except FileNotFoundError:
        raise BadMarker("it holds no marker file") from None
    except OSError as error:
        raise BadMarker(f"its marker cannot be opened ({error.strerror})") from None
    try:
        return fd, _read(fd, folder)
    except BaseException:
        os.close(fd)
        raise


def take_lock(fd: int, *, exclusive: bool) -> bool | None:
    """Return whether the lock on `fd` could be taken; None where the file system has no locks."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        if isinstance(error, BlockingIOError):
            return False
        raise
    return True


def judge(fd: int, marker: Marker, *, exclusive: bool) -> tuple[LeftoverState, str]:
    """Return the state of the folder that `marker`, open as `fd`, belongs to, and why.

    Whether the run lives is known by its lock, which `fd` then holds where the run is dead. Where it cannot
    be known, the state is one that nobody deletes.
    """
    if marker.state == "kept":
        return "kept", f"kept on purpose by the run of {marker.created:%Y-%m-%d %H:%M} UTC"
    # An equal boot id is the same running kernel, even where a container goes by another host name.
    boot_id = _boot_id()
    same_boot = bool(boot_id) and marker.boot_id == boot_id
    if not same_boot and marker.host != os.uname().nodename:
        return (
            "other-host",
            f"made on {marker.host!r}; from here nobody can tell whether that run still goes on",
        )
    free = take_lock(fd, exclusive=exclusive)
    if free is not None:
        return ("dead", "its run has ended without cleaning up") if free else ("live", f"in use by pid {marker.pid}")
    if boot_id and not same_boot:
        return "dead", "this host has restarted since"
    if marker.pid_namespace != _pid_namespace():
        return "live", "no locks here, and its process is in another container; taken as live"
    if marker.pid_start and _process_start(marker.pid) == marker.pid_start:
        return "live", f"in use by pid {marker.pid}"
    return "dead", f"its process, pid {marker.pid}, is gone"


def _read(fd: int, folder: str) -> Marker:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise BadMarker("its marker is no regular file")
    if found.st_uid != os.geteuid():
        raise BadMarker(f"its marker belongs to another user (uid {found.st_uid})")
    content = os.read(fd, _MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise BadMarker("its marker is too large to be one of ours")
    try:
        marker = msgspec.json.decode(content, type=Marker)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise BadMarker("its marker is not one that pytest-ckpt wrote") from None
    if marker.uid != os.geteuid() or marker.folder != folder:
        raise BadMarker("its marker was made for another folder")
    return marker


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _process_start(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name, in parentheses, may itself hold spaces and parentheses.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
