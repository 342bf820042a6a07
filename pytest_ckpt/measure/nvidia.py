"""NVIDIA accelerators through NVML; where it does not answer, what the driver itself shows in /proc."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from pytest_ckpt.records import Accelerators

UNKNOWN_GPU = "unknown NVIDIA GPU"
_VERSION = re.compile(r"NVRM version:.*?\s([0-9]+(?:\.[0-9]+)+)\s")
_DEVICE_NODE = re.compile(r"nvidia[0-9]+")
_MIG_ENABLED = 1  # NVML_DEVICE_MIG_ENABLE


class FoundAccelerators(NamedTuple):
    """The accelerators, equal ones together, and what could not be learnt of them, a sentence each."""

    accelerators: list[Accelerators]
    notes: list[str]


def find_accelerators(proc: str = "/proc", dev: str = "/dev") -> FoundAccelerators:
    """Return the NVIDIA accelerators that this process's driver shows, whatever CUDA_VISIBLE_DEVICES says.

    Where a driver is present and NVML fails, those that the driver names in /proc, without memory and link, so
    that a broken NVML never looks like a machine without accelerators.
    """
    if not _driver_present(proc, dev):
        return FoundAccelerators([], [])
    try:
        with _nvml() as nvml:
            devices, notes = _devices(nvml)
    except Exception as error:  # a library that is missing or of another version, or a binding without the function
        return _without_nvml(proc, dev, _reason(error))
    return FoundAccelerators(_grouped(devices), notes)


def driver_version(proc: str = "/proc", dev: str = "/dev") -> str | None:
    """Return the version of the NVIDIA driver, as in `550.54.15`; None where there is none or it is not told."""
    if not _driver_present(proc, dev):
        return None
    # The file first: NVML may take seconds to start on a machine of many sleeping devices.
    if found := _VERSION.search(_text(Path(proc, "driver/nvidia/version"))):
        return found[1]
    with suppress(Exception), _nvml() as nvml:
        return _string(nvml.nvmlSystemGetDriverVersion())
    return None


class _Device(NamedTuple):
    name: str
    memory_bytes: int | None
    pcie_generation: int | None
    pcie_width: int | None


def _driver_present(proc: str, dev: str) -> bool:
    places = (Path(proc, "driver/nvidia/version"), Path(dev, "nvidiactl"), Path(dev, "dxg"))
    return any(place.exists() for place in places)


@contextmanager
def _nvml() -> Iterator[Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        with suppress(Exception):
            pynvml.nvmlShutdown()


def _devices(nvml: Any) -> tuple[list[_Device], list[str]]:
    devices: list[_Device] = []
    notes = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except Exception as error:  # one that is lost must not hide the others
            notes.append(f"NVML cannot reach accelerator {index} ({_reason(error)}): it is not counted")
            continue
        devices += _parts(nvml, handle)
    return devices, notes


def _parts(nvml: Any, handle: Any) -> list[_Device]:
    """Return the device, or the instances it is divided into (MIG), whose link is the whole device's."""
    whole = _device(nvml, handle)
    mode = _ask(nvml, "nvmlDeviceGetMigMode", handle)
    if not mode or mode[0] != _MIG_ENABLED:
        return [whole]
    slots = range(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
    handles = [_ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, slot) for slot in slots]
    instances = [_device(nvml, one) for one in handles if one is not None]
    named = [one._replace(name=f"{whole.name} MIG") if one.name == UNKNOWN_GPU else one for one in instances]
    linked = [_Device(*one[:2], *whole[2:]) for one in named]
    return linked or [whole._replace(name=f"{whole.name} MIG")]


def _device(nvml: Any, handle: Any) -> _Device:
    name = _ask(nvml, "nvmlDeviceGetName", handle)
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    return _Device(
        _string(name) if name else UNKNOWN_GPU,
        int(memory.total) if memory is not None else None,
        # The most that device and slot can do together. What the link has fallen to while idle is another call.
        _ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle) or None,
        _ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle) or None,
    )


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """Return NVML's answer, or None where this device, driver or binding has none (vGPU, MIG)."""
    try:
        return getattr(nvml, function)(*arguments)
    except Exception:  # NVMLError where it is not supported, AttributeError in an older binding
        return None


def _without_nvml(proc: str, dev: str, reason: str) -> FoundAccelerators:
    names = []
    with suppress(OSError):
        for gpu in Path(proc, "driver/nvidia/gpus").iterdir():
            fields = dict(line.split(":", 1) for line in _text(gpu / "information").splitlines() if ":" in line)
            model = " ".join(fields.get("Model", "").split())
            names.append(model if model not in ("", "Unknown") else UNKNOWN_GPU)
    source = "accelerators are those that /proc/driver/nvidia names, without memory and PCIe link"
    if not names:
        with suppress(OSError):
            names = [UNKNOWN_GPU for entry in Path(dev).iterdir() if _DEVICE_NODE.fullmatch(entry.name)]
        source = "accelerators are counted in /dev, without names" if names else "no accelerators are known"
    devices = [_Device(name, None, None, None) for name in names]
    note = f"an NVIDIA driver is present, but NVML does not answer ({reason}): {source}"
    return FoundAccelerators(_grouped(devices), [note])


def _grouped(devices: list[_Device]) -> list[Accelerators]:
    # Memory does not part a group: of equal devices it may differ by what the driver reserves.
    groups: dict[tuple[str, int, int], list[_Device]] = {}
    for one in devices:
        groups.setdefault((one.name, one.pcie_generation or 0, one.pcie_width or 0), []).append(one)
    return [
        Accelerators(
            name=name,
            count=len(group),
            memory_bytes=min((one.memory_bytes for one in group if one.memory_bytes), default=None),
            pcie_generation=generation or None,
            pcie_width=width or None,
        )
        for (name, generation, width), group in sorted(groups.items())
    ]


def _string(value: str | bytes) -> str:
    return " ".join((value.decode(errors="replace") if isinstance(value, bytes) else value).split())


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
