"""Which mount holds a path, from what the kernel says about this process."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo: the mount's id, where it is mounted, and the type of its file system."""

    id: int
    point: str
    filesystem: str


UNKNOWN = Mount(-1, "/", "unknown")


def mount_of(path: str) -> Mount:
    """Return the mount that holds `path`, or would hold it where it is not there yet."""
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            mounts = parse_mountinfo(os.fsdecode(file.read()))
    except OSError:
        return UNKNOWN
    return find_mount(path, mounts, _mount_id(path))


def parse_mountinfo(text: str) -> list[Mount]:
    """Return the mounts in the kernel's order, in which a later one covers an earlier at the same point."""
    mounts = []
    # Split by "\n" alone: other line separators may stand unescaped in the name of a folder.
    for line in text.split("\n"):
        fields, dash, described = line.partition(" - ")
        if dash:
            number, _, _, _, point, *_ = fields.split(" ")
            mounts.append(Mount(int(number), _unescape(point), described.split(" ")[0]))
    return mounts


def find_mount(path: str, mounts: Sequence[Mount], mount_id: int | None = None) -> Mount:
    """Return the mount with `mount_id` if it is listed, else the last at the deepest containing point."""
    listed = [mount for mount in mounts if mount.id == mount_id]
    containing = [mount for mount in mounts if _contains(mount.point, path)]
    # max() gives the first of equals, so the later, covering mount must come first.
    return next(iter(listed), max(reversed(containing), key=lambda mount: len(mount.point), default=UNKNOWN))


def _mount_id(path: str) -> int | None:
    # Exact where spelling is not: a mount may lie hidden below a later one. Opening also triggers automounts.
    while not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    try:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        with open(f"/proc/self/fdinfo/{fd}") as file:
            ids = [int(line.split()[1]) for line in file if line.startswith("mnt_id:")]
    except OSError:
        return None
    finally:
        os.close(fd)
    return ids[0] if ids else None


def _contains(point: str, path: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _unescape(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
