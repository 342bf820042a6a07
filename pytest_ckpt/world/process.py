"""One rank's process as its parent sees it: phase, state, stack, log, exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from pytest_ckpt.world.status import read_status

_LOG_LINES = 20
_STACK_S = 2.0
GONE = "gone"


@dataclass(frozen=True)
class RankProcess:
    """A rank's process and the files it leaves; all of it can be read while the rank is stuck, stopped or dead."""

    rank: int
    popen: subprocess.Popen[bytes]
    status_file: Path
    stdout: Path
    stderr: Path

    @property
    def pid(self) -> int:
        """The process id, which is also that of its session: its children can be ended with it."""
        return self.popen.pid

    def phase(self) -> str:
        """Return the phases that it last noted."""
        return read_status(self.status_file).phase

    def state(self) -> str:
        """Return what the kernel says of it, as in `process sleeping`."""
        return f"process {process_state(self.pid)}"

    def is_stopped(self) -> bool:
        """Return whether it is stopped (SIGSTOP, a debugger)."""
        return process_state(self.pid) == psutil.STATUS_STOPPED

    def is_running(self) -> bool:
        """Return whether it has not ended."""
        return process_state(self.pid) not in (GONE, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

    def ended(self) -> str:
        """Return how it ended, in words."""
        code = self.exit_code()
        if code is None:
            return "closed its command channel"
        if code >= 0:
            return f"exited with status {code}"
        cause = f"killed by {_signal_name(-code)}"
        if -code == signal.SIGKILL:
            cause += " (by hand, or by the kernel when memory ran out: see dmesg)"
        return cause

    def exit_code(self) -> int | None:
        """Return its exit status, negative for a signal; None where it has not ended."""
        self.reap(1)
        return self.popen.returncode

    def reap(self, timeout_s: float) -> None:
        """Wait so long for its end, after which the kernel may forget it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout_s)

    def log_tail(self) -> str:
        """Return the last lines that it wrote."""
        lines: list[str] = []
        for path in (self.stdout, self.stderr):
            with contextlib.suppress(OSError):
                lines += path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "\n".join(lines)

    def has_left_others(self) -> bool:
        """Return whether it has ended, and processes that it started have not."""
        if self.popen.poll() is None:
            return not self.is_running()  # its first thread has ended, and the kernel is at work on the others
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def kill(self) -> None:
        """End it and what it started, also where it is stopped or has ended before its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def process_state(pid: int) -> str:
    """Return the kernel's word for a process of this host: `sleeping`, `stopped`, `disk-sleep` ..., or `gone`."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return GONE


def take_stacks(processes: Sequence[RankProcess]) -> dict[int, str]:
    """Return the Python stacks of these ranks, which `faulthandler` writes to their logs at SIGUSR1.

    A rank that is stopped or sits in the kernel writes none: it has no entry.
    """
    before = {process.rank: _size(process.stderr) for process in processes}
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + _STACK_S
    last: dict[int, str] = {}
    stacks: dict[int, str] = {}
    while len(stacks) < len(processes) and time.monotonic() < deadline:
        time.sleep(0.1)
        for process in processes:
            seen = _read_from(process.stderr, before[process.rank])
            if seen and seen == last.get(process.rank):  # whole, since nothing was added between two looks
                stacks[process.rank] = seen
            last[process.rank] = seen
    return stacks


def _read_from(path: Path, offset: int) -> str:
    with contextlib.suppress(OSError), path.open("rb") as log:
        log.seek(offset)
        return log.read().decode(errors="replace")
    return ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
