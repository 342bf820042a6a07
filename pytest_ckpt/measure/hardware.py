"""What this machine is, from what the kernel and the firmware tell everyone: no serial number is read."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pytest_ckpt.measure.nvidia import driver_version, find_accelerators
from pytest_ckpt.records import Hardware

__all__ = ["FoundHardware", "driver_version", "find_hardware", "look_at_hardware"]

_DMI = "class/dmi/id"  # of it only the four files named below are read; others hold serial numbers and tags
# EC2 alone writes its type there: "Google Compute Engine", "Virtual Machine" (Azure) and "HVM domU" name no type.
_EC2_TYPE = re.compile(r"[a-z][a-z0-9-]*\.[a-z0-9-]+")
_PLACEHOLDER = re.compile(
    r"(to be |)filled by o\.?e\.?m\.?|o\.?e\.?m\.?|system (product name|manufacturer|name|vendor)|default ?string"
    r"|product name|none|null|n/?a|not (specified|applicable|available|provided)|unknown|undefined|invalid|empty"
    r"|default|(base ?board|board|type ?[0-9].*) ?(product|board|manufacturer).*|type1productconfigid"
    r"|super server|[-x0.* ]*|0?123456789.*",
    re.IGNORECASE,
)
# What ARM machines write instead of a model name; others are written as their numbers.
_ARM_MAKERS = {
    "0x41": "ARM",
    "0x42": "Broadcom",
    "0x43": "Cavium",
    "0x46": "Fujitsu",
    "0x48": "HiSilicon",
    "0x4e": "NVIDIA",
    "0x51": "Qualcomm",
    "0x61": "Apple",
    "0x6d": "Microsoft",
    "0xc0": "Ampere",
}
_ARM_PARTS = {
    "0x41 0xd08": "Cortex-A72",
    "0x41 0xd0b": "Cortex-A76",
    "0x41 0xd0c": "Neoverse-N1",
    "0x41 0xd40": "Neoverse-V1",
    "0x41 0xd42": "Cortex-A78AE",
    "0x41 0xd49": "Neoverse-N2",
    "0x41 0xd4f": "Neoverse-V2",
    "0x41 0xd83": "Neoverse-V3AE",
    "0x41 0xd84": "Neoverse-V3",
    "0x41 0xd8e": "Neoverse-N3",
    "0x43 0x0af": "ThunderX2",
    "0x46 0x001": "A64FX",
    "0x48 0xd01": "Kunpeng-920",
    "0xc0 0xac3": "AmpereOne",
}
# Where control groups v2 and v1 are mounted, and how a process's line names them.
_GROUPS = (("fs/cgroup", ""), ("fs/cgroup/cpu", "cpu"), ("fs/cgroup/cpu,cpuacct", "cpu"))


class FoundHardware(NamedTuple):
    """The hardware, and what could not be learnt of it, a sentence each."""

    hardware: Hardware
    notes: list[str]


def find_hardware(proc: str = "/proc", sys: str = "/sys", dev: str = "/dev") -> Hardware:
    """Return what this machine is: the same after a reboot, in a container and under another host name."""
    return look_at_hardware(proc, sys, dev).hardware


def look_at_hardware(proc: str = "/proc", sys: str = "/sys", dev: str = "/dev") -> FoundHardware:
    """Return what this machine is, with notes for people; may take seconds where a GPU driver has to wake up."""
    processors = _cpuinfo(proc)
    online = _cpu_list(_text(f"{sys}/devices/system/cpu/online"))
    count = len(online) or sum("processor" in one for one in processors) or os.cpu_count() or 1
    instance_type, board = _machine(sys)
    found = find_accelerators(proc, dev)
    hardware = Hardware(
        instance_type=instance_type,
        board=board,
        cpu=_cpu(processors),
        cpus=count,
        usable_cpus=_usable_cpus(proc, sys, online, count),
        memory_bytes=_memory_bytes(proc),
        accelerators=found.accelerators,
    )
    return FoundHardware(hardware, found.notes)


def _machine(sys: str) -> tuple[str | None, str | None]:
    """Return instance type and board, each None where the firmware does not tell it."""
    vendor = _told(f"{sys}/{_DMI}/sys_vendor")
    product = _told(f"{sys}/{_DMI}/product_name")
    if vendor == "Amazon EC2" and product is not None and _EC2_TYPE.fullmatch(product):
        return product, None
    if product is None:
        vendor, product = _told(f"{sys}/{_DMI}/board_vendor"), _told(f"{sys}/{_DMI}/board_name")
    if product is not None and vendor is not None and not _begins_with_maker(product, vendor):
        product = f"{vendor} {product}"
    return None, product


def _begins_with_maker(product: str, vendor: str) -> bool:
    return product.lower().startswith(re.split(r"[ ,]", vendor.lower())[0])


def _told(path: str) -> str | None:
    text = " ".join("".join(char if char.isprintable() else " " for char in _text(path)).split())
    return None if _PLACEHOLDER.fullmatch(text) else text


def _cpuinfo(proc: str) -> list[dict[str, str]]:
    """Return the fields of each processor, names in lower case."""
    blocks = _text(f"{proc}/cpuinfo").split("\n\n")
    split = [[line.partition(":") for line in block.splitlines()] for block in blocks]
    return [{name.strip().lower(): " ".join(value.split()) for name, _, value in lines} for lines in split if lines]


def _cpu(processors: list[dict[str, str]]) -> str:
    arm = {_arm(one) for one in processors if "cpu implementer" in one and "cpu part" in one}
    if arm:
        return " and ".join(sorted(arm))
    for field in ("model name", "cpu", "uarch"):  # x86 and LoongArch, POWER, RISC-V
        told = [one[field] for one in processors if one.get(field)]
        if told:
            return told[0]
    return f"unknown {platform.machine()}"


def _arm(fields: dict[str, str]) -> str:
    maker, part = fields["cpu implementer"].lower(), fields["cpu part"].lower()
    name = _ARM_PARTS.get(f"{maker} {part}", f"part {part}")
    known = _ARM_MAKERS.get(maker, f"implementer {maker}")
    return name if name.startswith(known) else f"{known} {name}"


def _usable_cpus(proc: str, sys: str, online: set[int], count: int) -> int:
    status = re.search(r"^Cpus_allowed_list:\s*(\S+)", _text(f"{proc}/self/status"), re.MULTILINE)
    allowed = _cpu_list(status[1]) if status else set()
    # The kernel lists CPUs as allowed that are not there, where nobody restricted them.
    usable = len(allowed & online if online else allowed) or count
    for folder in _own_groups(proc, sys):
        usable = min(usable, _quota_cpus(folder) or usable)
    return max(1, usable)


def _own_groups(proc: str, sys: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups and of all groups around them, as seen from here."""
    lines = [line.split(":", 2) for line in _text(f"{proc}/self/cgroup").splitlines() if line.count(":") >= 2]
    for mounted, controller in _GROUPS:
        top = Path(sys, mounted)
        for _, controllers, path in lines:
            if controller in controllers.split(",") and ".." not in path:
                own = top / path.strip("/")
                yield from (own, *(parent for parent in own.parents if parent.is_relative_to(top)))


def _quota_cpus(folder: Path) -> int | None:
    """Return how many CPUs' time the group may take, rounded up; None without a limit."""
    words = _text(folder / "cpu.max").split()
    if not words:
        words = [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    try:
        quota, period = (int(word) for word in words)
    except ValueError:  # "max", or no such group
        return None
    return math.ceil(quota / period) if quota > 0 and period > 0 else None


def _memory_bytes(proc: str) -> int:
    found = re.search(r"^MemTotal:\s*([0-9]+) kB", _text(f"{proc}/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _cpu_list(text: str) -> set[int]:
    """Return the CPUs that the kernel's list names, as in `0-3,8`; none where it is no such list."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if not (found := re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part)):
            return set()
        cpus.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return cpus


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
