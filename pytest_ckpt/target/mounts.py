"""Which mount holds a path, from what the kernel says about this process."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

_OCTAL = re.compile(r"\\([0-7]{3})")
_NUMBER = re.compile(r"[0-9]{1,10}", re.ASCII)


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo: the mount's id, where it is mounted, and the type of its file system.

    `root` is the folder of the file system that is seen at `point`; `device` is its device number, as in
    `259:1`; `options` are those of the mount and then those of the file system.
    """

    id: int
    point: str
    filesystem: str
    device: str = ""
    root: str = "/"
    source: str = ""
    options: tuple[str, ...] = ()


UNKNOWN = Mount(-1, "/", "unknown")


def mount_of(path: str, proc: str = "/proc") -> Mount:
    """Return the mount that holds `path`, or would hold it where it is not there yet."""
    return find_mount(path, read_mounts(proc), mount_id_of(path, proc))


def read_mounts(proc: str = "/proc") -> list[Mount]:
    """Return the mounts that this process sees; none where the kernel does not tell them."""
    try:
        with open(f"{proc}/self/mountinfo", "rb") as file:
            return parse_mountinfo(os.fsdecode(file.read()))
    except OSError:
        return []


def parse_mountinfo(text: str) -> list[Mount]:
    """Return the mounts in the kernel's order, in which a later one covers an earlier at the same point."""
    mounts = []
    # Split by "\n" alone: other line separators may stand unescaped in the name of a folder.
    for line in text.split("\n"):
        fields, dash, described = line.partition(" - ")
        words, kind = fields.split(" "), described.split(" ")
        if not dash or len(words) < 6 or not _NUMBER.fullmatch(words[0]):
            continue
        mounts.append(
            Mount(
                id=int(words[0]),
                point=_unescape(words[4]),
                filesystem=_unescape(kind[0]),
                device=words[2],
                root=_unescape(words[3]),
                source=_unescape(kind[1]) if len(kind) > 1 else "",
                options=tuple(_unescape(option) for option in _options(words[5], *kind[2:3])),
            )
        )
    return mounts


def find_mount(path: str, mounts: Sequence[Mount], mount_id: int | None = None) -> Mount:
    """Return the mount with `mount_id` if it is listed, else the last at the deepest containing point."""
    listed = [mount for mount in mounts if mount.id == mount_id]
    containing = [mount for mount in mounts if _contains(mount.point, path)]
    # max() gives the first of equals, so the later, covering mount must come first.
    return next(iter(listed), max(reversed(containing), key=lambda mount: len(mount.point), default=UNKNOWN))


def mount_id_of(path: str, proc: str = "/proc") -> int | None:
    """Return the kernel's id of the mount that holds `path`, or its nearest folder; None where it is not told."""
    # Exact where spelling is not: a mount may lie hidden below a later one. Opening also triggers automounts.
    while not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    try:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        with open(f"{proc}/self/fdinfo/{fd}") as file:
            ids = [int(line.split()[1]) for line in file if line.startswith("mnt_id:")]
    except OSError:
        return None
    finally:
        os.close(fd)
    return ids[0] if ids else None


def _options(*groups: str) -> list[str]:
    return list(dict.fromkeys(option for group in groups for option in group.split(",") if option))


def _contains(point: str, path: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _unescape(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
