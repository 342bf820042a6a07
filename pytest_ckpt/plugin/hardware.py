"""`pytest-ckpt hardware`: the hardware id of a target, and the facts it was made of."""

from __future__ import annotations

import json

import msgspec

from pytest_ckpt.measure.hardware import driver_version, look_at_hardware
from pytest_ckpt.measure.hardware_id import hardware_id, id_rule
from pytest_ckpt.plugin.settings import default_root
from pytest_ckpt.target.identity import identify
from pytest_ckpt.target.path import open_target
from pytest_ckpt.target.spec import TargetSpec, parse_target
from pytest_ckpt.units import format_bytes

_SOURCE = "pytest-ckpt hardware"


def hardware_lines(target: str | None, as_json: bool) -> list[str]:
    """Return what the command prints for `target`; `SettingError` where nothing can be saved there.

    The first line of the plain form is the id alone. Without a target it is the folder below which a run without
    one saves.
    """
    opened = open_target(parse_target(target, _SOURCE) if target is not None else _default_target())
    opened.check()  # a folder that is not there would have the id of the disk that it should have been mounted on
    volume = identify(opened.location)
    storage = (volume.storage_class, volume.filesystem, volume.medium)
    found = look_at_hardware()
    hardware, driver = found.hardware, driver_version()
    chosen, rule = hardware_id(hardware, *storage), id_rule(hardware, *storage)
    if as_json:
        facts = {
            "hardware_id": chosen,
            "rule": [{"part": part, "facts": facts} for part, facts in rule],
            "hardware": msgspec.to_builtins(hardware),
            "target": {
                "location": opened.location,
                "default": target is None,
                "mount": volume.mount,
                "storage_class": volume.storage_class,
                "storage_rule": volume.rule,
                "filesystem": volume.filesystem,
                "medium": volume.medium,
                "device_model": volume.device_model,
            },
            "driver": driver,
            "notes": found.notes,
        }
        return [json.dumps(facts, indent=2)]
    default = ", the default: pytest's temporary root" if target is None else ""
    kept = [
        ("target", f"{opened.location}{default}; mounted at {volume.mount}"),
        ("storage", f"{volume.storage_class}: {volume.rule}"),
        ("disk model", volume.device_model or "not told"),
        *([("CPU", f"{hardware.cpu}, {hardware.cpus} online")] if hardware.instance_type else []),
        ("usable CPUs", f"{hardware.usable_cpus} of {hardware.cpus}"),
        ("memory", _size(hardware.memory_bytes)),
        *((f"memory of {one.name}", _size(one.memory_bytes)) for one in hardware.accelerators),
        ("NVIDIA driver", driver or "none"),
    ]
    return [
        chosen,
        "made of:",
        *_table(rule),
        "known too, and no part of the id:",
        *_table(kept),
        *(f"note: {note}" for note in found.notes),
    ]


def _default_target() -> TargetSpec:
    root = default_root()
    return TargetSpec("local", root, root, "the default")


def _table(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {facts}" for name, facts in rows]


def _size(count: int | None) -> str:
    return format_bytes(count) if count else "not told"
