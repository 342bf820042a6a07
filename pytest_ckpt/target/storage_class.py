"""The storage class of a disk, of devices built on disks and of file systems, each with the facts that gave it.

A class is given where the facts decide it and is `unknown` elsewhere: a wrong one would let figures of different
storage meet in a comparison.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pytest_ckpt.target.volume import UNKNOWN_CLASS, Disk, Layer, Medium, VolumeIdentity


class Classified(NamedTuple):
    """A storage class and the facts that gave it, as half a sentence."""

    name: str
    rule: str


IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
NETWORK = {
    "nfs": "nfs",
    "nfs4": "nfs",
    "lustre": "lustre",
    "cifs": "cifs",
    "smb3": "cifs",
    "ceph": "ceph",
    "gpfs": "gpfs",
    "beegfs": "beegfs",
    "wekafs": "weka",
    "9p": "9p",
    "virtiofs": "virtiofs",
    "afs": "afs",
    "orangefs": "orangefs",
}
"""File systems that are reached over a network, or from a guest in its host, and their classes."""

# The program behind a FUSE mount is known by the type's second half, or by the source where there is none.
_FUSE_NETWORK = {
    *("s3fs", "goofys", "geesefs", "mountpoint-s3", "gcsfuse", "blobfuse", "blobfuse2", "rclone", "sshfs", "ossfs"),
    *("glusterfs", "juicefs", "ceph", "ceph-fuse", "mfs", "seaweedfs", "alluxio-fuse", "curlftpfs", "dfuse"),
}
_FUSE_LOCAL = {"mergerfs", "fuse-overlayfs", "bindfs", "unionfs", "gocryptfs", "encfs", "ntfs-3g", "squashfuse"}

_MODELS = [
    (re.compile(r"Amazon EC2 NVMe Instance Storage"), "nvme-instance-store"),
    (re.compile(r"Amazon Elastic Block Store"), "ebs"),
    (re.compile(r"nvme_card-pd|Google PersistentDisk"), "gcp-pd"),  # Hyperdisks too have this model
    (re.compile(r"nvme_card[0-9]*|Google EphemeralDisk"), "gcp-local-ssd"),
    (re.compile(r"MSFT NVMe Accelerator v[0-9.]+"), "azure-disk"),
    (re.compile(r"Microsoft NVMe Direct Disk( v[0-9]+)?"), "azure-local-nvme"),
    # What a hypervisor emulates says nothing of what is behind it, least of all that it rotates.
    (re.compile(r"(QEMU|VMware|VBOX|ORACLE-VBOX|Msft) .*", re.IGNORECASE), "virtual-disk"),
]
_TRANSPORT_IS_CLASS = {
    "virtio": "virtio",
    "virtio-scsi": "virtio",
    "xen": "xen",
    "loop": "loop",
    "zram": "zram",
    "memory": "ramdisk",
    "nbd": "nbd",
    "rbd": "rbd",
    "iscsi": "iscsi",
    "usb": "usb",
    "mmc": "mmc",
    "pmem": "pmem",
}
_IN_MEMORY_CLASSES = {"zram", "ramdisk"}
_NAMES = {"nvme": "NVMe", "sata": "SATA", "ata": "ATA", "sas": "SAS", "usb": "USB", "fc": "Fibre Channel"}
_MOST_LAYERS = 32


def classify_disk(disk: Disk) -> Classified:
    """Return the class of a disk from its model, transport and whether it rotates."""
    shown = f"{_NAMES.get(disk.transport, disk.transport)} disk"
    if disk.model is not None:
        for pattern, name in _MODELS:
            if pattern.fullmatch(disk.model):
                kind = "NVMe" if disk.transport == "nvme" else "disk"
                return Classified(name, f"{kind} model {disk.model!r}")
        shown += f", model {disk.model!r}"
    if disk.transport == "nvme":
        if disk.model is None:
            # It might be a cloud's network disk, which only the model would show.
            return Classified(UNKNOWN_CLASS, "NVMe disk whose model /sys does not tell")
        return Classified("nvme", f"NVMe model {disk.model!r}")
    if disk.transport.startswith("nvme-"):
        return Classified("nvme-of", f"NVMe over {disk.transport.removeprefix('nvme-')}")
    if disk.backing_file is not None:
        where = f"lies on {lies_on(disk.backing)}" if disk.backing else "is not seen from here"
        shown = f"a loop device whose file {where}"
    by_transport = _TRANSPORT_IS_CLASS.get(disk.transport)
    if by_transport is not None:
        return Classified(by_transport, shown)
    if disk.rotational is None:
        return Classified(UNKNOWN_CLASS, f"{shown}; /sys does not tell whether it rotates")
    turns = "rotational" if disk.rotational else "not rotational"
    if disk.transport in ("sata", "sas"):
        return Classified("hdd" if disk.rotational else f"{disk.transport}-ssd", f"{shown}, {turns}")
    if disk.transport == "ata" and disk.rotational:
        return Classified("hdd", f"{shown}, {turns}")
    return Classified(UNKNOWN_CLASS, f"{shown}, {turns}, which does not decide what it is")


def lies_on(backing: VolumeIdentity) -> str:
    """Return the words for a volume that another lies on."""
    return f"{backing.filesystem} of class {backing.storage_class} ({backing.rule})"


def classify_devices(tops: Sequence[str], layers: Sequence[Layer], disks: Sequence[Disk]) -> Classified:
    """Return the class of the topmost devices (at least one), composed of those of their disks."""
    composition = _Composition(layers, disks)
    return composition.of(tops[0]) if len(tops) == 1 else composition.of_several("pool", tops)


def classify_filesystem(filesystem: str) -> Classified | None:
    """Return the class of a file system whose type alone decides it, else None."""
    if filesystem in IN_MEMORY:
        return Classified(filesystem, f"the file system {filesystem} keeps files in memory")
    if name := NETWORK.get(filesystem):
        return Classified(name, f"the file system is of type {filesystem}")
    return None


def is_fuse(filesystem: str) -> bool:
    """Return whether a program in user space serves the file system."""
    return filesystem in ("fuse", "fuseblk") or filesystem.startswith("fuse.")


def fuse_program(filesystem: str, source: str) -> str:
    """Return the name of the program that serves a FUSE file system, as far as the mount tells it."""
    return filesystem.removeprefix("fuse.") if filesystem.startswith("fuse.") else source


def fuse_network(program: str) -> bool | None:
    """Return whether that program reaches over a network; None where it is not one we know."""
    if program in _FUSE_NETWORK:
        return True
    return False if program in _FUSE_LOCAL else None


def disks_network(disks: Sequence[Disk]) -> bool | None:
    """Return whether the files that loop devices lie on are reached over a network; None where not seen."""
    told = [disk.backing.network if disk.backing else None for disk in disks if disk.transport == "loop"]
    return True if True in told else None if None in told or not disks else False


def disks_medium(disks: Sequence[Disk]) -> Medium:
    """Return what the disks keep their data in."""
    media: set[Medium] = {_disk_medium(disk) for disk in disks}
    return "network" if "network" in media else "memory" if media == {"memory"} else "storage"


def _disk_medium(disk: Disk) -> Medium:
    if disk.backing is not None:
        return disk.backing.medium
    return "memory" if disk.storage_class in _IN_MEMORY_CLASSES else "storage"


class _Composition:
    """The classes of devices by name, each worked out once, whatever /sys says lies on what."""

    def __init__(self, layers: Sequence[Layer], disks: Sequence[Disk]) -> None:
        self._layers = {layer.name: layer for layer in layers}
        self._classes = {disk.name: Classified(disk.storage_class, disk.rule) for disk in disks}
        self._above: list[str] = []

    def of(self, name: str) -> Classified:
        if name in self._classes:
            return self._classes[name]
        layer = self._layers.get(name)
        if layer is None:
            return Classified(UNKNOWN_CLASS, f"/sys does not show {name}")
        if not layer.below:
            return Classified(UNKNOWN_CLASS, f"/sys shows no disk below {name}")
        if name in self._above or len(self._above) > _MOST_LAYERS:
            return Classified(UNKNOWN_CLASS, f"/sys shows no end of what {name} lies on")
        self._above.append(name)
        self._classes[name] = self._of_layer(layer)
        self._above.pop()
        return self._classes[name]

    def of_several(self, word: str, names: Sequence[str], members: int | None = None) -> Classified:
        found = [self.of(name) for name in names]
        unknown = next((one for one in found if one.name == UNKNOWN_CLASS), None)
        if unknown is not None:
            return unknown
        counted = Counter(one.name for one in found)
        missing = f" of {members}" if members is not None and members != len(found) else ""
        each = found[0].rule if len(set(found)) == 1 else " and ".join(f"{n} {name}" for name, n in counted.items())
        name = f"{word}-{len(found)}x-{found[0].name}" if len(counted) == 1 else f"{word}-mixed"
        return Classified(name, f"{word} of {len(found)}{missing} members: {each}")

    def _of_layer(self, layer: Layer) -> Classified:
        if layer.kind in ("raid", "btrfs"):
            if layer.level is None:
                return Classified(UNKNOWN_CLASS, f"/sys does not tell the RAID level of {layer.name}")
            level = f"btrfs-{layer.level}" if layer.kind == "btrfs" else layer.level
            return self.of_several(level, layer.below, layer.members)
        if layer.kind in ("crypt", "multipath"):
            below = self.of(layer.below[0])
            if below.name == UNKNOWN_CLASS:
                return below
            through = "dm-crypt" if layer.kind == "crypt" else f"{len(layer.below)} paths"
            return Classified(f"{layer.kind}-{below.name}", f"{below.rule}, through {through}")
        apart = self._apart(layer.below)
        return self.of(apart[0]) if len(apart) == 1 else self.of_several(layer.kind, apart)

    def _apart(self, names: Sequence[str]) -> list[str]:
        """Return `names` without partitions of a disk that another of them is a partition of as well."""
        by_disk: dict[str, str] = {}
        for name in names:
            layer = self._layers.get(name)
            by_disk.setdefault(layer.below[0] if layer is not None and layer.kind == "partition" else name, name)
        return list(by_disk.values())
