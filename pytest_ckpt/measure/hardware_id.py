"""The hardware id: the readable name under which baselines of equal machines and equal storage are kept.

It is made of what decides the speed of a save and nothing else, so it is the same after a reboot and under another
host name, and another one where an accelerator is gone or the disk is not mounted. docs/reference/hardware-id.md
has the rule for people.
"""

from __future__ import annotations

import hashlib
import re

from pytest_ckpt.errors import SettingError
from pytest_ckpt.records import Accelerators, Hardware

LONGEST = 120
"""Characters of an id, at most."""

_LEAST_OF_MACHINE = 16  # characters of the machine's part that stay readable, however long the others are
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)

# Boards that hypervisors make up: short names, without the versions that change under the same machine.
_VIRTUAL_BOARDS = [
    (re.compile(r"Standard PC \(i440FX"), "qemu-i440fx"),
    (re.compile(r"Standard PC \(Q35"), "qemu-q35"),
    (re.compile(r"KVM Virtual Machine"), "kvm"),
    (re.compile(r"VMware"), "vmware"),
    (re.compile(r"HVM domU"), "xen"),
    (re.compile(r"Google Compute Engine"), "gce"),
    (re.compile(r"Microsoft.* Virtual Machine"), "hyperv"),
    (re.compile(r"VirtualBox"), "virtualbox"),
]
_COMPANY = re.compile(r"\b(inc|incorporated|corp|corporation|co|ltd|limited|llc|gmbh)\b", re.IGNORECASE)
_MODEL_CODE = re.compile(r"-?\[[^\]]*\]-?")  # as Lenovo writes a machine type behind the name
_MARKS = re.compile(r"\((r|tm|c)\)|[®™©]", re.IGNORECASE)
_NO_MODEL = re.compile(r"\b(with|w/) radeon\b.*|\b[a-z0-9]+-cores?\b|\b(cpu|processor)\b", re.IGNORECASE)
_MEMORY_WORDS = ("tmpfs", "ramfs", "hugetlbfs", "zram", "ramdisk")
_CLASSES_OVER_FILES = ("overlay", "loop")  # what they lie on is told by the medium alone


def hardware_id(hardware: Hardware, storage_class: str, filesystem: str, medium: str) -> str:
    """Return the id of this hardware with a target of that class, file system and medium."""
    parts = [part for part, _ in id_rule(hardware, storage_class, filesystem, medium)]
    whole = "-".join(parts)
    if len(whole) <= LONGEST:
        return whole
    # The machine's part is the long one; storage and accelerators, which tell ids of one machine apart, stay.
    rest = "-".join([hashlib.sha256(whole.encode()).hexdigest()[:8], *parts[1:]])
    machine = parts[0][: max(_LEAST_OF_MACHINE, LONGEST - len(rest) - 1)]
    return _trimmed(f"{_trimmed(machine)}-{rest}"[:LONGEST])


def id_rule(hardware: Hardware, storage_class: str, filesystem: str, medium: str) -> list[tuple[str, str]]:
    """Return the parts of the id in their order, each with the facts that gave it as words for people."""
    rule = [_machine(hardware)]
    if hardware.accelerators:
        part = "-".join(_accelerators_part(one) for one in hardware.accelerators)
        rule.append((part, ", ".join(_described(one) for one in hardware.accelerators)))
    facts = f"storage class {storage_class}, file system {filesystem}, medium {medium}"
    rule.append((_storage(storage_class, filesystem, medium), facts))
    return rule


def check_id(text: str, source: str) -> str:
    """Return the id that a user gave, which came from `source`; `SettingError` if it is no safe name of a folder."""
    if _SAFE.fullmatch(text) and len(text) <= LONGEST:
        return text
    suggested = _trimmed(re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:LONGEST]) or "my-machine-nvme"
    raise SettingError(
        f"hardware id {text!r} (from {source}) cannot be the name of a folder: write a letter or digit, then letters, "
        f"digits, '.', '_' and '-', {LONGEST} characters at most, as in {suggested}"
    )


def _machine(hardware: Hardware) -> tuple[str, str]:
    if hardware.instance_type is not None:
        return _slug(hardware.instance_type), f"instance type {hardware.instance_type}, which has its CPU"
    part = f"{_cpu(hardware.cpu)}-{hardware.cpus}cpu"
    facts = f"CPU {hardware.cpu}, {hardware.cpus} of them online"
    if hardware.board is None:
        return part, f"{facts}; the firmware tells neither instance type nor board"
    return f"{_board(hardware.board)}-{part}", f"board {hardware.board}; {facts}"


def _board(board: str) -> str:
    short = next((name for pattern, name in _VIRTUAL_BOARDS if pattern.search(board)), None)
    return short or _slug(_COMPANY.sub(" ", _MODEL_CODE.sub(" ", board)))


def _cpu(model: str) -> str:
    name, _, clock = _MARKS.sub(" ", model).partition("@")
    part = _slug(_NO_MODEL.sub(" ", name))
    # Clouds sell CPUs as "Intel Xeon CPU @ 2.20GHz": that fixed text is then all that tells generations apart.
    return part if not clock or re.search("[0-9]", part) else f"{part}-{_slug(clock)}"


def _accelerators_part(group: Accelerators) -> str:
    name = _slug(re.sub(r"\bNVIDIA\b", " ", _MARKS.sub(" ", group.name), flags=re.IGNORECASE))
    link = f"{group.pcie_generation or ''}{f'x{group.pcie_width}' if group.pcie_width else ''}"
    return f"{group.count}x{name}" + (f"-pcie{link}" if link else "")


def _storage(storage_class: str, filesystem: str, medium: str) -> str:
    kind, files = _slug(storage_class), _slug(filesystem)
    # The class of a network file system or of one in memory is its own name: `nfs` and `nfs4`, `weka` and `wekafs`.
    part = files if files.startswith(kind) else f"{kind}-{files}"
    if medium == "memory":
        told = any(word in part for word in _MEMORY_WORDS)
    elif medium == "network":
        told = not any(word in kind.split("-") for word in _CLASSES_OVER_FILES)
    else:
        told = True
    return part if told else f"{part}-{_slug(medium)}"


def _slug(text: str) -> str:
    """Return `text` in lower case with runs of anything but letters, digits and dots within words as one `-`."""
    words = re.findall(r"[a-z0-9]+(?:\.[a-z0-9]+)*", text.lower().replace("+", "plus"))
    return "-".join(words) or "unknown"


def _trimmed(text: str) -> str:
    return text.strip("-._")


def _described(group: Accelerators) -> str:
    return f"{group.count} x {group.name}, {group.link}{' at most' if group.pcie_width else ''}"
