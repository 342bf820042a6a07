"""Memory of this machine and of this process, as the kernel accounts it."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP_LIMITS = (
    # (limit, usage) of control groups v2 and v1: a container may hold far less than the machine shows
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


def available_memory_bytes() -> int:
    """Return the bytes that new processes can take without swapping: the machine's, or its container's if less."""
    available = int(psutil.virtual_memory().available)
    for limit_file, usage_file, stat_file in _CGROUP_LIMITS:
        try:
            limit = int(Path(limit_file).read_text())
            usage = int(Path(usage_file).read_text())
            stat = dict(line.split() for line in Path(stat_file).read_text().splitlines())
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
        reclaimable = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
        available = min(available, max(0, limit - usage + reclaimable))
    return available


class PeakMemory:
    """The peak resident memory of this process above its level at `start`, in bytes, from VmHWM.

    The kernel keeps the peak itself, so nothing has to sample while a save runs (proc(5), /proc/PID/clear_refs).
    """

    def __init__(self) -> None:
        self._before = 0
        self._resettable = True

    def start(self) -> None:
        """Take the present level and make the kernel forget the earlier peak."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._resettable = False
        self._before = _status_bytes("VmRSS")

    def stop(self) -> int | None:
        """Return the bytes by which the peak rose above the level, or None where the peak cannot be reset."""
        if not self._resettable:
            return None
        return max(0, _status_bytes("VmHWM") - self._before)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
