"""In what two machines differ, as words."""

from __future__ import annotations

from pytest_ckpt.records import Accelerators, Hardware
from pytest_ckpt.units import format_bytes

_MEMORY_TOLERANCE = 0.02  # the kernel, and so MemTotal, takes a little more or less from version to version


def hardware_differences(now: Hardware, stored: Hardware) -> list[str]:
    """Return what differs, each as `fact: ... there, ... here`; there is `stored`, here is `now`."""
    pairs = [
        ("instance type", stored.instance_type or "not told", now.instance_type or "not told"),
        ("board", stored.board or "not told", now.board or "not told"),
        ("CPU", stored.cpu, now.cpu),
        ("CPUs", stored.cpus, now.cpus),
        ("usable CPUs", stored.usable_cpus, now.usable_cpus),
    ]
    if _memory_differs(stored.memory_bytes, now.memory_bytes):
        pairs.append(("memory", format_bytes(stored.memory_bytes), format_bytes(now.memory_bytes)))
    found = [f"{fact}: {there} there, {here} here" for fact, there, here in pairs if there != here]
    return found + _accelerator_differences(now.accelerators, stored.accelerators)


def _memory_differs(one: int, other: int) -> bool:
    return abs(one - other) > _MEMORY_TOLERANCE * max(one, other)


def _accelerator_differences(now: list[Accelerators], stored: list[Accelerators]) -> list[str]:
    here, there = _by_name(now), _by_name(stored)
    if set(here) != set(there):
        return [f"accelerators: {_counted(there)} there, {_counted(here)} here"]
    found = []
    for name in there:
        counts = [sum(group.count for group in side[name]) for side in (there, here)]
        links = [" and ".join(group.link for group in side[name]) for side in (there, here)]
        memory = [min((group.memory_bytes or 0 for group in side[name]), default=0) for side in (there, here)]
        if counts[0] != counts[1]:
            found.append(f"accelerators: {counts[0]} x {name} there, {counts[1]} here")
        if links[0] != links[1]:
            found.append(f"link of {name}: {links[0]} there, {links[1]} here")
        if all(memory) and _memory_differs(*memory):
            found.append(f"memory of {name}: {format_bytes(memory[0])} there, {format_bytes(memory[1])} here")
    return found


def _by_name(groups: list[Accelerators]) -> dict[str, list[Accelerators]]:
    names: dict[str, list[Accelerators]] = {}
    for group in groups:
        names.setdefault(group.name, []).append(group)
    return names


def _counted(names: dict[str, list[Accelerators]]) -> str:
    return " and ".join(f"{sum(one.count for one in groups)} x {name}" for name, groups in names.items()) or "none"
