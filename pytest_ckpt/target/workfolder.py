"""The folder that a run makes for itself below a target, and the only code that deletes one."""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import shutil
import stat
import tempfile
from contextlib import suppress

import msgspec

from pytest_ckpt.errors import SettingError, TargetVanished
from pytest_ckpt.target import marker as markers
from pytest_ckpt.target.interface import LeftoverState
from pytest_ckpt.target.marker import MARKER, BadMarker, Marker
from pytest_ckpt.target.preflight import attempt, preflight
from pytest_ckpt.target.space import tree_bytes
from pytest_ckpt.target.spec import slug

_LOOKS = 100
PREFIX = "pytest-ckpt-"
_NAME = re.compile(re.escape(PREFIX) + r"[a-z0-9_]{8}")  # what tempfile.mkdtemp makes of the prefix


class MarkedFolder:
    """A work folder held open, known by its marker to be ours; only such a folder can be deleted.

    Everything was checked, and is deleted, through descriptors, so a folder or link that is put in the place
    of the one that was checked is not touched.
    """

    def __init__(self, path: str, folder_fd: int, marker_fd: int, marker: Marker) -> None:
        self.path = path
        self.folder_fd = folder_fd
        self.marker = marker
        self._marker_fd: int | None = marker_fd

    @classmethod
    def create(cls, path: str) -> MarkedFolder:
        """Mark the empty folder that this process has just made, and lock it; `SettingError` if refused."""
        with attempt("open a folder", path):
            folder_fd = _open_folder(path)
        try:
            owner = os.fstat(folder_fd).st_uid
            if owner != os.geteuid():
                raise SettingError(
                    f"target {os.path.dirname(path)} gives uid {owner} what uid {os.geteuid()} makes there "
                    "(NFS with root squashed, or a mount with a fixed owner), so cleaning up would not be "
                    "safe; run as that user, or choose another --ckpt-target"
                )
            marker = markers.new_marker(os.path.basename(path), secrets.token_hex(16))
            with attempt("create a file", path):
                marker_fd = markers.create_marker(folder_fd, marker)
        except BaseException:
            os.close(folder_fd)
            raise
        return cls(path, folder_fd, marker_fd, marker)

    @classmethod
    def open(cls, path: str, *, writable: bool) -> MarkedFolder:
        """Open a folder that some run has made; `BadMarker` where it is not surely one of this user's."""
        name = os.path.basename(path)
        if not has_folder_name(name):
            raise BadMarker("it does not have the name of a work folder")
        try:
            folder_fd = _open_folder(path)
        except OSError as error:
            raise BadMarker(f"it cannot be opened ({error.strerror})") from None
        try:
            owner = os.fstat(folder_fd).st_uid
            if owner != os.geteuid():
                raise BadMarker(f"it belongs to another user (uid {owner})")
            return cls(path, folder_fd, *markers.open_marker(folder_fd, name, writable=writable))
        except BaseException:
            os.close(folder_fd)
            raise

    def judge(self, *, exclusive: bool) -> tuple[LeftoverState, str]:
        """Return the folder's state and why; a dead one stays locked by this object until it is released."""
        assert self._marker_fd is not None
        return markers.judge(self._marker_fd, self.marker, exclusive=exclusive)

    def keep(self) -> None:
        """Mark the folder as kept on purpose and release it; `OSError` where the marker cannot be written."""
        assert self._marker_fd is not None
        try:
            markers.write_marker(self._marker_fd, msgspec.structs.replace(self.marker, state="kept"))
        finally:
            self.release()

    def delete(self) -> None:
        """Delete the folder with all in it, and release it; `OSError` where something cannot be deleted.

        The marker goes last, so that a deletion which is cut short can be finished by `clean`.
        """
        try:
            for name in self._names():
                self.delete_entry(name)
            # On NFS an open file cannot be deleted, only hidden in its folder, which then cannot be either.
            self._unlock()
            with suppress(FileNotFoundError):  # `clean` elsewhere may use the moment without the lock
                os.unlink(MARKER, dir_fd=self.folder_fd)
                if not self.is_here() and os.path.lexists(self.path):
                    raise OSError(errno.ESTALE, "another folder or link stands in its place, and is left", self.path)
                os.rmdir(self.path)
        finally:
            self.release()

    def delete_entry(self, name: str) -> None:
        """Delete the entry `name` of this folder, a link itself and not what it points to."""
        if not shutil.rmtree.avoids_symlink_attacks:
            raise OSError(errno.ENOTSUP, "this Python might follow links while it deletes", self.path)
        inside = f"/proc/self/fd/{self.folder_fd}"
        # A writer that is just ending may rename or delete files under our hands: look again then.
        for _ in range(_LOOKS):
            try:
                is_folder = stat.S_ISDIR(os.lstat(name, dir_fd=self.folder_fd).st_mode)
            except FileNotFoundError:
                return
            try:
                if is_folder:
                    shutil.rmtree(os.path.join(inside, name))
                else:
                    os.unlink(name, dir_fd=self.folder_fd)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise OSError(error.errno, error.strerror, os.path.join(self.path, name)) from error
        raise OSError(errno.EBUSY, "something goes on writing", os.path.join(self.path, name))

    def release(self) -> None:
        """Close all that is held of the folder, and leave it as it is."""
        self._unlock()
        if self.folder_fd >= 0:
            os.close(self.folder_fd)
            self.folder_fd = -1

    def is_here(self) -> bool:
        """Return whether the path still leads to this folder, and not to nothing or to another one."""
        try:
            found, held = os.lstat(self.path), os.fstat(self.folder_fd)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)

    def _names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self.folder_fd) if name != MARKER]
        except FileNotFoundError:  # the folder has been deleted since it was opened
            return []

    def _unlock(self) -> None:
        if self._marker_fd is not None:
            os.close(self._marker_fd)
            self._marker_fd = None


class PathWorkFolder:
    """A `WorkFolder` in the file system: mode 0700, marked and locked as long as it is open."""

    def __init__(self, held: MarkedFolder) -> None:
        self._held = held
        self._numbers = itertools.count(1)
        self._open = True

    @property
    def location(self) -> str:
        """The work folder's path."""
        return self._held.path

    def new_round(self, name: str) -> str:
        """Return the path of a folder for one save, numbered and named after `name`; it is not made."""
        self._require_open()
        self._require_here()
        return os.path.join(self.location, f"{next(self._numbers):04d}-{slug(name, 'round')}")

    def bytes_in(self, location: str) -> int:
        """Return the bytes of the files at `location`, no links followed; `OSError` if it is not there."""
        self._require_here()
        return tree_bytes(location)

    def remove(self, location: str) -> None:
        """Delete one round; a missing one is no error.

        `ValueError` for a path that is not directly inside this folder, for a link and for the marker;
        `OSError` where something cannot be deleted.
        """
        self._require_open()
        parent, name = os.path.split(location)
        if parent != self.location or name in ("", ".", "..", MARKER) or os.path.islink(location):
            raise ValueError(f"{location!r} is no round inside the work folder {self.location!r}, and is not deleted")
        self._held.delete_entry(name)

    def close(self, keep: bool = False) -> str | None:
        """Delete the folder and return None, or keep it, unlocked and marked as kept, and return its path.

        A second call does nothing. `OSError` where something cannot be deleted; `clean` can then finish it.
        """
        if not self._open:
            return None
        self._open = False
        if keep:
            self._held.keep()
            return self.location
        self._held.delete()
        return None

    def _require_here(self) -> None:
        # A writer makes missing folders anew, on whatever file system is there by then.
        if self._open and not self._held.is_here():
            raise TargetVanished(
                f"{self.location} is not the folder any more that this run made: the target was unmounted, moved or "
                "replaced meanwhile; figures since then would be another storage's, and what was written there is left"
            )

    def _require_open(self) -> None:
        # A save into a closed folder would make it anew, without a marker, and nobody would ever clean it.
        if not self._open:
            raise RuntimeError(f"the work folder {self.location!r} is closed")


def has_folder_name(name: str) -> bool:
    """Return whether a work folder could have been made under this name."""
    return _NAME.fullmatch(name) is not None


def make_work_folder(target: str, name: str | None = None) -> PathWorkFolder:
    """Make a work folder in the folder `target` and try there, with a few bytes, what a save needs.

    `name` is that of a work folder that this run has made on another host. `SettingError` names the operation that
    was refused; what had been made by then is removed.
    """
    with attempt("mkdir", os.path.join(target, PREFIX)):
        if name is None:
            path = tempfile.mkdtemp(prefix=PREFIX, dir=target)
        else:
            path = os.path.join(target, name)
            os.mkdir(path, 0o700)
    held: MarkedFolder | None = None
    try:
        held = MarkedFolder.create(path)
        preflight(path)
    except BaseException as error:
        try:
            _remove_unmarked(path) if held is None else held.delete()
        except OSError as left:
            raise SettingError(f"{error}; nor could {path} be removed again ({left.strerror})") from error
        raise
    return PathWorkFolder(held)


def _remove_unmarked(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(path, MARKER))
    os.rmdir(path)


def _open_folder(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
