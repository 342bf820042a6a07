"""Memory of this machine and of this process, as the kernel accounts it."""

from __future__ import annotations

from pathlib import Path

import psutil

_GROUPS = "/proc/self/cgroup"
_CGROUP_FILES = (
    # where control groups v2 and v1 are mounted, how a process's line names them, and their limit and usage
    ("/sys/fs/cgroup", "", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def available_memory_bytes() -> int:
    """Return the bytes that new processes can take without swapping.

    That is the machine's, or less where a control group of this process (a container, a batch job) has a limit.
    """
    available = int(psutil.virtual_memory().available)
    for mounted, controller, limit_name, usage_name in _CGROUP_FILES:
        for folder in _own_groups(Path(mounted), controller):
            try:
                limit = int((folder / limit_name).read_text())
                usage = int((folder / usage_name).read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # no such group, or no limit ("max")
                continue
            reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            available = min(available, max(0, limit - usage + reclaimable))
    return available


def _own_groups(mounted: Path, controller: str) -> list[Path]:
    """Return the folders of this process's group and of all groups around it, as far as they are seen from here."""
    try:
        lines = Path(_GROUPS).read_text().splitlines()
    except OSError:
        return [mounted]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = mounted / path.strip("/")
            return [own, *(parent for parent in own.parents if parent.is_relative_to(mounted))]
    return [mounted]


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
