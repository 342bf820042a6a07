"""What a round uses: counters of the process, the block devices and the page cache, as the kernel keeps them."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path

import msgspec

_SECTOR_BYTES = 512
"""The unit of /sys/dev/block/*/stat, whatever the device's own sector size (Documentation/block/stat.rst)."""


class ProcessUsage:
    """CPU seconds and bytes sent to storage of this process between `start` and `stop`; two reads, no sampling."""

    def start(self) -> None:
        """Take the present counts."""
        self._cpu_s, self._write_bytes = _cpu_s(), _io_bytes("write_bytes")

    def stop(self) -> tuple[float, int | None]:
        """Return the CPU seconds (user and system) and the written bytes; None where the kernel does not count them."""
        written = _io_bytes("write_bytes")
        known = written is not None and self._write_bytes is not None
        return _cpu_s() - self._cpu_s, (written or 0) - (self._write_bytes or 0) if known else None


class DeviceUsage(msgspec.Struct, frozen=True):
    """What block devices did in a stretch of time."""

    written_bytes: int
    busy_s: float
    """Of the busiest device: seconds in which it had requests in flight."""


class BlockDevices:
    """The counters of some block devices, by number (`259:0`)."""

    def __init__(self, numbers: Sequence[str]) -> None:
        self._files = [Path("/sys/dev/block") / number / "stat" for number in numbers]
        self._before = self._read()

    def since(self) -> DeviceUsage | None:
        """Return what happened since this was made; None where no device has counters."""
        before, after = self._before, self._read()
        if not after or len(before) != len(after):
            return None
        written = sum(now[0] - then[0] for then, now in zip(before, after, strict=True))
        busy_s = max(now[1] - then[1] for then, now in zip(before, after, strict=True))
        return DeviceUsage(written, busy_s)

    def _read(self) -> list[tuple[int, float]]:
        counters = []
        for file in self._files:
            try:
                fields = [int(field) for field in file.read_text().split()]
            except (OSError, ValueError):
                continue
            counters.append((fields[6] * _SECTOR_BYTES, fields[9] / 1000))
        return counters


class PageCacheWatch:
    """The most bytes that waited for write-back, and the least memory available, of the moments it looked."""

    def __init__(self) -> None:
        self.dirty_peak_bytes = 0
        self.least_available_bytes: int | None = None

    def look(self) -> None:
        """Look once; costs one read of /proc/meminfo."""
        fields = _meminfo()
        self.dirty_peak_bytes = max(self.dirty_peak_bytes, fields.get("Dirty", 0) + fields.get("Writeback", 0))
        available = fields.get("MemAvailable")
        if available is not None:
            self.least_available_bytes = min(available, self.least_available_bytes or available)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def storage_read_bytes() -> int | None:
    """Return the bytes that this process has had fetched from storage so far: what the page cache gave is not in it."""
    return _io_bytes("read_bytes")


def _io_bytes(name: str) -> int | None:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def _meminfo() -> dict[str, int]:
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    return fields
