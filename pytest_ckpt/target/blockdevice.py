"""Block devices as /sys shows them: from a mounted one down to its disks, and the facts of each disk."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Sequence

from pytest_ckpt.target.volume import Disk, Layer, LayerKind

_MOST_BYTES = 4096
_MOST_DEVICES = 512  # more than any machine has below one file system; a bound for what garbage can cost
_SECTOR_BYTES = 512  # the unit of /sys/block/*/size, whatever the disk's own block size
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_DEVICE_NUMBER = re.compile(r"[0-9]{1,9}:[0-9]{1,9}", re.ASCII)

# The start of dm/uuid; what follows it identifies one volume, for multipath by a serial number, and is not read.
_DM_KINDS: list[tuple[str, LayerKind]] = [
    ("LVM-", "lvm"),
    ("CRYPT-", "crypt"),
    ("mpath-", "multipath"),
    ("part", "partition"),
]
_DM_PREFIX_BYTES = 6

_BY_NAME = re.compile(r"(loop|zram|ram|nbd|rbd|drbd|pmem|xvd)[0-9a-z]+")
_BY_FOLDER = [
    (re.compile(r"/usb[0-9]+/"), "usb"),
    (re.compile(r"/session[0-9]+/"), "iscsi"),
    (re.compile(r"/rport-[0-9]"), "fc"),
    (re.compile(r"/end_device-[0-9]"), "sas"),
    (re.compile(r"/mmc_host/"), "mmc"),
    (re.compile(r"/virtio[0-9]+/host[0-9]+/"), "virtio-scsi"),
    (re.compile(r"/virtio[0-9]+/block/"), "virtio"),
    (re.compile(r"/vbd-[0-9]+/"), "xen"),
    (re.compile(r"/vmbus", re.IGNORECASE), "hyperv"),
]
_ATA = re.compile(r"/ata[0-9]+/")
_HOST = re.compile(r"/(host[0-9]+)/")

_BTRFS_PROFILES = ("single", "dup", "raid0", "raid1", "raid1c3", "raid1c4", "raid10", "raid5", "raid6")


def printable(text: str) -> str:
    """Return `text` in one line that can be shown and stored, undecodable bytes as `\\xNN`."""
    text = text.encode(errors="surrogateescape").decode(errors="backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def device_of_number(number: str, sys: str) -> str | None:
    """Return the kernel name of the device with that number, as in `259:1`; None where /sys does not know it."""
    if not _DEVICE_NUMBER.fullmatch(number):
        return None
    name = os.path.basename(os.path.realpath(f"{sys}/dev/block/{number}"))
    return name if os.path.isdir(_folder(name, sys)) else None


def devices_of_source(source: str, sys: str) -> list[str]:
    """Return the kernel names of the devices that a mount's source names; none where one is not known."""
    # bcachefs writes all its devices, with colons between.
    names = [_name_of_source(part, sys) for part in source.split(":")]
    return [name for name in names if name is not None] if None not in names else []


def descend(mounted: Sequence[str], filesystem: str, sys: str) -> tuple[list[str], list[Layer], list[Disk]]:
    """Return the topmost devices, the layers from there down, and the disks at the end, each device once."""
    layers: list[Layer] = []
    disks: list[Disk] = []
    tops, pending = list(mounted), deque(mounted)
    if filesystem == "btrfs" and (pool := _btrfs_pool(mounted, sys)) is not None:
        layers.append(pool)
        tops, pending = [pool.name], deque(pool.below)
    seen: set[str] = set()
    while pending and len(seen) < _MOST_DEVICES:
        name = pending.popleft()
        if name in seen:
            continue
        seen.add(name)
        layer = _layer(name, sys)
        if layer is None:
            disks.append(_disk(name, sys))
        else:
            layers.append(layer)
            pending.extend(layer.below)
    return tops, layers, disks


def _folder(name: str, sys: str) -> str:
    return os.path.realpath(f"{sys}/class/block/{name}")


def _name_of_source(source: str, sys: str) -> str | None:
    if not source.startswith("/dev/"):
        return None
    # A slash in a kernel name is written as an exclamation mark.
    name = source.removeprefix("/dev/").replace("/", "!")
    if os.path.isdir(_folder(name, sys)):
        return name
    directory, _, last = source.removeprefix("/dev/").rpartition("/")
    if not directory or "/" in directory:
        return None
    # LVM joins group and volume by a hyphen, and doubles those in the names.
    escaped = f"{directory.replace('-', '--')}-{last.replace('-', '--')}"
    wanted = last if directory == "mapper" else escaped
    for candidate in _listed(f"{sys}/class/block"):
        if candidate.startswith("dm-") and _text(f"{sys}/class/block/{candidate}/dm/name") == wanted:
            return candidate
    return None


def _btrfs_pool(tops: Sequence[str], sys: str) -> Layer | None:
    for entry in _listed(f"{sys}/fs/btrfs"):
        folder = f"{sys}/fs/btrfs/{entry}"
        devices = _listed(f"{folder}/devices")
        if not set(tops) & set(devices):
            continue
        found = [name for name in _listed(f"{folder}/allocation/data") if name in _BTRFS_PROFILES]
        # While it is being converted, a file system has two profiles, and which is written to is not told.
        profile = found[0] if len(found) == 1 else None
        return Layer(name="btrfs", kind="btrfs", below=devices, level=profile) if len(devices) > 1 else None
    return None


def _layer(name: str, sys: str) -> Layer | None:
    folder = _folder(name, sys)
    slaves = [printable(slave) for slave in _listed(f"{folder}/slaves")]
    if os.path.exists(f"{folder}/partition"):
        return Layer(name=name, kind="partition", below=[printable(os.path.basename(os.path.dirname(folder)))])
    if os.path.isdir(f"{folder}/md"):
        level, members = _text(f"{folder}/md/level"), _number(f"{folder}/md/raid_disks")
        return Layer(name=name, kind="raid", below=slaves, level=level, members=members)
    if os.path.isdir(f"{folder}/dm"):
        uuid = _text(f"{folder}/dm/uuid", _DM_PREFIX_BYTES) or ""
        kinds = [kind for prefix, kind in _DM_KINDS if uuid.startswith(prefix)]
        kind: LayerKind = kinds[0] if kinds else "dm"
        return Layer(name=name, kind=kind, below=slaves)
    return Layer(name=name, kind="stacked", below=slaves) if slaves else None


def _disk(name: str, sys: str) -> Disk:
    folder = _folder(name, sys)
    sectors = _number(f"{folder}/size")
    rotational = _number(f"{folder}/queue/rotational")
    file = _text(f"{folder}/loop/backing_file")
    return Disk(
        name=name,
        model=_model(folder),
        transport=_transport(name, folder, sys),
        rotational=None if rotational is None else rotational != 0,
        scheduler=_scheduler(_text(f"{folder}/queue/scheduler")),
        size_bytes=None if sectors is None else sectors * _SECTOR_BYTES,
        logical_block_bytes=_number(f"{folder}/queue/logical_block_size"),
        physical_block_bytes=_number(f"{folder}/queue/physical_block_size"),
        backing_file=file,
    )


def _model(folder: str) -> str | None:
    # Cards (MMC) have a name instead; other devices' names say nothing of the model.
    model = _text(f"{folder}/device/model") or (_text(f"{folder}/device/name") if "/mmc_host/" in folder else None)
    if model is None:
        return None
    vendor = _text(f"{folder}/device/vendor")
    # "ATA" is what libata writes for every disk, and a number is that of a PCI device.
    told = vendor is not None and vendor != "ATA" and not vendor.startswith("0x")
    return " ".join((f"{vendor} {model}" if told else model).split())


def _transport(name: str, folder: str, sys: str) -> str:
    if name.startswith("nvme"):
        return _nvme_transport(folder)
    if found := _BY_NAME.fullmatch(name):
        return {"ram": "memory", "xvd": "xen"}.get(found[1], found[1])
    # The folders above a disk in /sys are the buses it hangs on.
    buses = folder.removeprefix(os.path.realpath(sys))
    if _ATA.search(buses):
        host = _HOST.search(buses)
        driver = _text(f"{sys}/class/scsi_host/{host[1]}/proc_name") if host else None
        return "sata" if driver is not None and ("ahci" in driver or "sata" in driver) else "ata"
    return next((transport for pattern, transport in _BY_FOLDER if pattern.search(buses)), "unknown")


def _nvme_transport(folder: str) -> str:
    # With multipath the disk belongs to a subsystem, and its controllers stand beside it.
    device = f"{folder}/device"
    controllers = [device, *(f"{device}/{entry}" for entry in _listed(device) if re.fullmatch(r"nvme[0-9]+", entry))]
    told = {value for controller in controllers if (value := _text(f"{controller}/transport")) is not None}
    if told == {"pcie"} or (not told and "/pci" in folder):
        return "nvme"
    return f"nvme-{told.pop()}" if len(told) == 1 else "unknown"


def _scheduler(text: str | None) -> str | None:
    if text is None:
        return None
    chosen = re.search(r"\[([^\]]+)\]", text)
    return chosen[1] if chosen else text


def _text(path: str, most_bytes: int = _MOST_BYTES) -> str | None:
    """Return the words of a file of /sys; None where it is missing, empty or refuses to be read."""
    try:
        # O_NONBLOCK, since /sys may be anything that somebody mounted there, and a pipe would wait for ever.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    try:
        content = os.read(fd, most_bytes)
    except OSError:
        return None
    finally:
        os.close(fd)
    return printable(content.strip(b"\0\t\n\r ").decode(errors="surrogateescape")) or None


def _number(path: str) -> int | None:
    text = _text(path)
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None


def _listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path), key=_natural)
    except (OSError, ValueError):
        return []


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(number or 0), text) for number, text in re.findall(r"([0-9]{0,18})([^0-9]*)", name)]
