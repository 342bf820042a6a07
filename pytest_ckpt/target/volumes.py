"""The other volumes of this machine that could take checkpoints, among which a faster one may be."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence

from pytest_ckpt.target import storage_class as classes
from pytest_ckpt.target.identity import identify_mount
from pytest_ckpt.target.mounts import Mount, find_mount, mount_id_of, read_mounts
from pytest_ckpt.target.volume import VolumeIdentity

_ANSWER_S = 2.0
_NOT_FOR_DATA = {"vfat", "msdos", "exfat", "devtmpfs", "ramfs", "hugetlbfs"}
_WITHOUT_DEVICE = {"tmpfs", "btrfs", "bcachefs", "zfs", "overlay", *classes.NETWORK}
_FUSE_PSEUDO = {"lxcfs", "portal", "gvfsd-fuse", "rofiles-fuse"}
_SYSTEM_FOLDERS = ("/proc", "/sys", "/run", "/dev", "/boot", "/snap", "/var/lib/kubelet")
_SHARED_MEMORY = "/dev/shm"


def volumes(
    *, beside: str | None = None, least_bytes: int = 0, proc: str = "/proc", sys: str = "/sys"
) -> list[VolumeIdentity]:
    """Return the writable volumes with at least `least_bytes` free, by mount point, each once.

    Left out are the one that holds the path `beside`, pseudo file systems, those that the system keeps for itself
    (as at /boot) and those that do not answer. Memory is among them. Whether this user may write there is not
    asked, since it is usually a folder below that is meant for users.
    """
    mounts = read_mounts(proc)
    own = _own(beside, mounts, proc)
    by_device: dict[str, Mount] = {}
    for mount in sorted(mounts, key=_preference):
        if mount.device != own and mount.device not in by_device and _could_hold(mount, mounts):
            free = _free_bytes(mount.point, mount.id, proc)
            if free is not None and free >= max(least_bytes, 1):
                by_device[mount.device] = mount
    identities = [identify_mount(mount, mounts, sys=sys) for mount in by_device.values()]
    # What an overlay writes goes to a volume that is listed itself; without one that is seen, it stands for it.
    seen = [identity for identity in identities if identity.backing is None]
    return sorted(seen, key=lambda identity: identity.mount)


def _own(path: str | None, mounts: Sequence[Mount], proc: str) -> str | None:
    if path is None:
        return None
    path = os.path.realpath(path)
    return find_mount(path, mounts, mount_id_of(path, proc)).device


def _preference(mount: Mount) -> tuple[bool, int, str]:
    # The whole file system rather than a folder of it that is mounted once more.
    return mount.root != "/", len(mount.point), mount.point


def _could_hold(mount: Mount, mounts: Sequence[Mount]) -> bool:
    if "ro" in mount.options or _is_system(mount.point) or mount.filesystem in _NOT_FOR_DATA:
        return False
    if find_mount(mount.point, mounts) != mount:
        return False  # a later mount covers it
    if classes.is_fuse(mount.filesystem):
        return classes.fuse_program(mount.filesystem, mount.source) not in _FUSE_PSEUDO
    return mount.filesystem in _WITHOUT_DEVICE or not mount.device.startswith("0:")


def _is_system(point: str) -> bool:
    return point != _SHARED_MEMORY and _below_any(point, _SYSTEM_FOLDERS)


def _below_any(point: str, folders: Iterable[str]) -> bool:
    return any(point == folder or point.startswith(folder + "/") for folder in folders)


def _free_bytes(point: str, mount_id: int, proc: str) -> int | None:
    """Return the bytes free there; None where it is no folder, hidden below another mount, or does not answer."""
    answers: list[int] = []

    def ask() -> None:
        try:
            if os.path.isdir(point) and mount_id_of(point, proc) in (mount_id, None):
                found = os.statvfs(point)
                answers.append(found.f_bavail * found.f_frsize)
        except OSError:
            return

    # A network file system whose server is gone answers never, and must not take this run with it.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_ANSWER_S)
    return answers[0] if answers else None
