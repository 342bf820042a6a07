"""Targets that are folders in the file system."""

from __future__ import annotations

import os
import re
import stat
import sys

import psutil

from pytest_ckpt.errors import SettingError
from pytest_ckpt.target.clean import find_leftovers
from pytest_ckpt.target.interface import Leftover, Target, WorkFolder
from pytest_ckpt.target.mounts import mount_of
from pytest_ckpt.target.spec import TargetSpec
from pytest_ckpt.target.workfolder import make_work_folder

_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_ENDING = re.compile(r"(/\.?)+$")  # with it, reading a link would read what is behind it
_MOST_LINKS = 40  # as many as the kernel follows


class PathTarget:
    """A `Target` that is a folder, resolved when this is made.

    A link that is changed afterwards changes nothing but that the target is refused, if its path is no longer
    what it resolved to.
    """

    kind = "path"

    def __init__(self, spec: TargetSpec) -> None:
        self.label = spec.label
        self.given = spec.given or spec.location
        self.location = os.path.realpath(spec.location)
        self._spec = spec
        self._foreign_link = _foreign_link(spec.location)
        mount = mount_of(self.location)
        self.mount = mount.point
        self.filesystem = mount.filesystem
        self.medium = "memory" if mount.filesystem in _IN_MEMORY else "storage"

    def check(self) -> list[str]:
        """Return warnings, a sentence each; `SettingError` if nothing can be saved here. Writes nothing."""
        found = self._require_usable()
        warnings = []
        if self.location != os.path.normpath(self._spec.location):
            warnings.append(f"{self.given} links to {self.location}, which is used.")
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            warnings.append(
                f"{self.location} is writable for everyone without the sticky bit, so any user can rename or "
                f"delete what is saved there; `chmod +t {self.location}` prevents it."
            )
        if os.geteuid() == 0:
            warnings.append("Running as root: permissions protect nothing, and other users cannot clean up.")
            if self.filesystem.startswith("nfs"):
                warnings.append(
                    f"{self.location} is on NFS, where root is usually squashed to a user without rights; "
                    "run as the user who trains if saving is refused."
                )
        return warnings

    def free_bytes(self) -> int:
        """Return the bytes that this user may still write; `OSError` where the file system does not say.

        Of one in memory without a limit it is the memory available. Quotas are not known here.
        """
        found = os.statvfs(self.location)
        if found.f_blocks:
            return found.f_bavail * found.f_frsize
        return psutil.virtual_memory().available if self.medium == "memory" else sys.maxsize

    def open(self) -> WorkFolder:
        """Make a work folder here and try, with a few bytes, what a save needs; `SettingError` if refused."""
        self._require_usable()
        return make_work_folder(self.location)

    def leftovers(self) -> list[Leftover]:
        """Return what killed runs of this user left here; `SettingError` if it cannot be listed."""
        return [found for found in find_leftovers(self.location) if found.state == "dead"]

    def _require_usable(self) -> os.stat_result:
        if self._foreign_link is not None:
            link, owner = self._foreign_link
            raise self._refusal(
                f"{link} is a link that belongs to another user (uid {owner})",
                f"{self.location} if that is meant",
            )
        try:
            found = os.lstat(self.location)
        except OSError as error:
            linked = self.location != os.path.normpath(self._spec.location)
            place = f"it links to {self.location}, which" if linked else self.location
            reason = f"{place} cannot be reached ({error.strerror})"
            raise self._refusal(reason, "the path of a folder that exists") from None
        if os.path.realpath(self.location) != self.location:
            raise self._refusal(f"{self.location} has become a link meanwhile", "a path that nobody changes")
        if not stat.S_ISDIR(found.st_mode):
            raise self._refusal("it is not a folder", f"a folder, as in {os.path.dirname(self.location)}")
        if os.statvfs(self.location).f_flag & os.ST_RDONLY:
            raise self._refusal(f"the file system at {self.mount} is mounted read-only", "a path on another one")
        if not os.access(self.location, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            raise self._refusal(f"uid {os.geteuid()} may not write there", "a folder of this user")
        return found

    def _refusal(self, reason: str, instead: str) -> SettingError:
        return SettingError(
            f"target {self.given!r} (from {self._spec.source}) cannot be used: {reason}; write {instead}"
        )


def open_target(spec: TargetSpec) -> Target:
    """Return the target that `spec` names, resolved but not yet checked."""
    return PathTarget(spec)


def _foreign_link(path: str) -> tuple[str, int] | None:
    """Return the first link at the end of `path` that neither this user nor root owns, and its owner."""
    # Whoever owns such a link decides where this run writes and deletes, and may change its mind.
    for _ in range(_MOST_LINKS):
        path = _ENDING.sub("", path) or "/"
        try:
            target = os.readlink(path)
            owner = os.lstat(path).st_uid
        except OSError:
            return None
        if owner not in (0, os.geteuid()):
            return path, owner
        path = os.path.join(os.path.dirname(path), target)
    return None
