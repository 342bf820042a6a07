"""What a path's volume is, from what the kernel says in /proc and /sys; no root and no other program needed."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pytest_ckpt.target import storage_class as classes
from pytest_ckpt.target.blockdevice import descend, device_of_number, devices_of_source, printable
from pytest_ckpt.target.mounts import UNKNOWN, Mount, find_mount, mount_id_of, read_mounts
from pytest_ckpt.target.storage_class import Classified
from pytest_ckpt.target.volume import UNKNOWN_CLASS, Disk, Medium, VolumeIdentity

_MOST_BACKINGS = 4  # a loop device on an overlay on a loop device is already more than anybody means
# These number their mounts themselves, and /sys does not know the numbers.
_OWN_NUMBERS = {"btrfs", "bcachefs"}
_SECRET_OPTION = re.compile(r"([^=]*(?:pass|secret|token|cred|key)[^=]*)=.*", re.IGNORECASE | re.DOTALL)
_SECRET_IN_SOURCE = [(re.compile(r"://.*@"), "://<hidden>@"), (re.compile(r"(://[^?]*)\?.*"), r"\1?<hidden>")]


def identify(path: str, *, proc: str = "/proc", sys: str = "/sys") -> VolumeIdentity:
    """Return what is known of the volume that holds `path`, or would hold it where it is not there yet."""
    path = os.path.realpath(path)
    mounts = read_mounts(proc)
    return identify_mount(find_mount(path, mounts, mount_id_of(path, proc)), mounts, sys=sys)


def identify_mount(mount: Mount, mounts: Sequence[Mount], *, sys: str = "/sys") -> VolumeIdentity:
    """Return what is known of `mount`, which is one of `mounts`."""
    return _Identifier(mounts, sys).identity(mount)


def is_root_filesystem(path: str, *, proc: str = "/proc") -> bool:
    """Return whether `path` lies on the file system mounted at `/`, be it a container's; False if not told.

    A folder of it that is mounted once more elsewhere, and another subvolume of the same btrfs, lie on it too.
    """
    path = os.path.realpath(path)
    mounts = read_mounts(proc)
    return is_root_mount(find_mount(path, mounts, mount_id_of(path, proc)), mounts)


def is_root_mount(mount: Mount, mounts: Sequence[Mount]) -> bool:
    """Return whether `mount`, which is one of `mounts`, is of the file system mounted at `/`."""
    if mount is UNKNOWN:
        # Within a chroot the kernel lists no mount at "/", and what no listed one holds lies there.
        return bool(mounts)
    return mount.device == find_mount("/", mounts).device


@dataclass(frozen=True)
class _Found:
    """What one way of looking at a mount gives; what it does not say is said by nothing else."""

    classified: Classified
    medium: Medium = "storage"
    network: bool | None = None
    backing: VolumeIdentity | None = None


class _Identifier:
    def __init__(self, mounts: Sequence[Mount], sys: str) -> None:
        self._mounts = mounts
        self._sys = sys

    def identity(self, mount: Mount, depth: int = 0) -> VolumeIdentity:
        tops, layers, disks = descend(self._devices(mount), mount.filesystem, self._sys)
        disks = [self._classified(disk, mount, depth) for disk in disks]
        by_type = classes.classify_filesystem(mount.filesystem)
        if by_type is not None:
            in_memory = mount.filesystem in classes.IN_MEMORY
            found = _Found(by_type, "memory" if in_memory else "network", not in_memory)
        elif mount.filesystem == "overlay":
            found = self._overlay(mount, depth)
        elif classes.is_fuse(mount.filesystem):
            found = _fuse(mount, disks)
        elif tops:
            composed = classes.classify_devices(tops, layers, disks)
            found = _Found(composed, classes.disks_medium(disks), classes.disks_network(disks))
        else:
            facts = f"{printable(mount.filesystem)} on {_source(mount)!r}, device {printable(mount.device)!r}"
            found = _Found(Classified(UNKNOWN_CLASS, f"{facts}: /sys does not tell its disks"))
        return VolumeIdentity(
            mount=printable(mount.point),
            filesystem=printable(mount.filesystem),
            options=[_option(option) for option in mount.options],
            source=_source(mount),
            device_number=printable(mount.device),
            layers=layers,
            disks=disks,
            backing=found.backing,
            network=found.network,
            medium=found.medium,
            storage_class=found.classified.name,
            rule=found.classified.rule,
            root_filesystem=is_root_mount(mount, self._mounts),
        )

    def _devices(self, mount: Mount) -> list[str]:
        name = device_of_number(mount.device, self._sys)
        if name is not None:
            return [name]
        # Of others the source is whatever the one who mounted wrote: a tmpfs may well have the name of a disk.
        known = mount.filesystem in _OWN_NUMBERS or not mount.device.startswith("0:")
        return devices_of_source(mount.source, self._sys) if known else []

    def _classified(self, disk: Disk, mount: Mount, depth: int) -> Disk:
        if disk.backing_file is not None:
            is_there = os.path.isfile(disk.backing_file)
            backing = self._backing(disk.backing_file, mount, depth) if is_there else None
            disk = msgspec.structs.replace(disk, backing=backing)
        name, rule = classes.classify_disk(disk)
        return msgspec.structs.replace(disk, storage_class=name, rule=rule)

    def _overlay(self, mount: Mount, depth: int) -> _Found:
        upper = [option.removeprefix("upperdir=") for option in mount.options if option.startswith("upperdir=")]
        backing = self._backing(upper[0], mount, depth) if upper and os.path.isdir(upper[0]) else None
        if backing is None:
            return _Found(Classified("overlay", "an overlay whose upper folder is not seen from here"))
        rule = f"an overlay whose upper folder lies on {classes.lies_on(backing)}"
        return _Found(Classified("overlay", rule), backing.medium, backing.network, backing)

    def _backing(self, path: str, above: Mount, depth: int) -> VolumeIdentity | None:
        """Return the volume of `path`, which is another than `above`; None for a path as others see it."""
        mount = find_mount(path, self._mounts)
        if not os.path.isabs(path) or mount in (above, UNKNOWN) or depth >= _MOST_BACKINGS:
            return None
        return self.identity(mount, depth + 1)


def _fuse(mount: Mount, disks: Sequence[Disk]) -> _Found:
    program = classes.fuse_program(mount.filesystem, mount.source)
    network = False if mount.filesystem == "fuseblk" and disks else classes.fuse_network(program)
    rule = f"a FUSE file system of type {printable(mount.filesystem)} from {_source(mount)!r}"
    return _Found(Classified("fuse", rule), "network" if network else "storage", network)


def _option(option: str) -> str:
    return printable(_SECRET_OPTION.sub(r"\1=<hidden>", option))


def _source(mount: Mount) -> str:
    source = mount.source
    for pattern, hidden in _SECRET_IN_SOURCE:
        source = pattern.sub(hidden, source)
    return printable(source)
