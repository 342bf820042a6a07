"""What is known of a volume: plain data that can be written into a record, without serial numbers."""

from __future__ import annotations

from typing import Literal

import msgspec

Medium = Literal["memory", "storage", "network"]
LayerKind = Literal["partition", "lvm", "crypt", "multipath", "dm", "raid", "btrfs", "stacked"]

UNKNOWN_CLASS = "unknown"


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A block device that lies on others; `below` are their kernel names."""

    name: str
    kind: LayerKind
    below: list[str]
    level: str | None = None
    """RAID level as the kernel writes it, as in `raid0`; of btrfs, the profile of its data."""
    members: int | None = None
    """How many members a RAID should have; `below` has fewer where one is missing."""


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """A block device that lies on nothing else the kernel knows of; None is what /sys does not tell."""

    name: str
    model: str | None
    transport: str
    """As in `nvme`, `nvme-tcp`, `sata`, `sas`, `usb`, `iscsi`, `virtio`, `virtio-scsi`, `loop`; or `unknown`."""
    rotational: bool | None
    """As the kernel says; virtual disks often say True and are none."""
    scheduler: str | None
    size_bytes: int | None
    logical_block_bytes: int | None
    physical_block_bytes: int | None
    storage_class: str = UNKNOWN_CLASS
    rule: str = ""
    backing_file: str | None = None
    """The file below a loop device."""
    backing: VolumeIdentity | None = None
    """The volume of that file; None where it is not seen from here."""


class VolumeIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A mounted file system, down to the disks that decide its speed.

    Undecodable bytes of names are written as `\\xNN`, and values of options and sources that may be credentials
    as `<hidden>`.
    """

    mount: str
    filesystem: str
    options: list[str]
    source: str
    device_number: str
    layers: list[Layer]
    """From the mounted device down, without the disks."""
    disks: list[Disk]
    backing: VolumeIdentity | None
    """The volume that an overlay writes to; None where it is not seen from here."""
    network: bool | None
    """Whether files, or what backs them, are reached through a file protocol (a network disk is a disk);
    None where the facts do not tell."""
    medium: Medium
    """`storage` where nothing says otherwise."""
    storage_class: str
    """What decides the speed, in a word; `unknown` where the facts do not decide it."""
    rule: str
    """The facts that gave `storage_class`, in half a sentence."""
    root_filesystem: bool
    """Whether this is the file system that is mounted at `/`."""

    @property
    def device_model(self) -> str | None:
        """The models of the disks, each once; None where none is told."""
        return ", ".join(dict.fromkeys(disk.model for disk in self.disks if disk.model)) or None
