"""A user's project in a folder of its own, in which the tests run pytest and look at what it leaves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

SUITE = ("--pyargs", "pytest_ckpt.suites")
TINY = "--ckpt-model=llama3-tiny"
HEEDING_CTRL_C = ("env", "--default-signal=INT")
"""Else a job in a shell's background, which ignores Ctrl-C, would hand that down.

No `preexec_fn`: Python in a process forked from one with threads is not safe, and torch brings threads.
"""
DEADLINE_S = 240
_HEREDITARY = ("PYTEST_", "CKPT_", "CODSPEED_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TOX_", "COV_")

SAVING_TEST = """
def test_save(ckpt_save, ckpt_target, ckpt_model, ckpt_world, ckpt_mode):
    ckpt_save(mode=ckpt_mode)
"""


@dataclass
class Result:
    """What one command came to."""

    status: int
    out: str
    seconds: float
    in_target: list[str]
    processes: list[str]
    """Command lines of processes that it left running."""

    @property
    def lines(self) -> pytest.LineMatcher:
        """The output, for `fnmatch_lines`."""
        return pytest.LineMatcher(self.out.splitlines())

    def require(self, status: int) -> Result:
        """Return this result of a command that ended with `status` and left neither process nor folder."""
        assert (self.status, self.in_target, self.processes) == (status, [], []), self.out
        return self


@dataclass
class RanksResult:
    """What the ranks of one job came to."""

    statuses: list[int]
    outs: list[str]
    seconds: float
    in_target: list[str]
    processes: list[str]

    @property
    def out(self) -> str:
        """What rank 0 printed."""
        return self.outs[0]

    def require(self, *statuses: int) -> RanksResult:
        """Return this result of ranks that ended so, the others silent, and left neither process nor folder."""
        found = (self.statuses, self.outs[1:], self.in_target, self.processes)
        assert found == (list(statuses), [""] * (len(statuses) - 1), [], []), "\n".join(self.outs)
        return self


@dataclass
class Project:
    """A folder with test files, a target `disk`, and temporary folders of its own."""

    path: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.target = self.path / "disk"
        self.target.mkdir()
        self.temporary = self.path / "t"
        self.temporary.mkdir()
        self.write("pytest.ini", "[pytest]\n")

    def write(self, name: str, text: str) -> Path:
        """Make a file of the project."""
        path = self.path / name
        path.write_text(text)
        return path

    def pytest(self, *arguments: object, target: bool = True, **options: Any) -> Result:
        """Run pytest with a tiny model, two rounds and the project's target, as far as `arguments` say nothing else."""
        given = [str(argument) for argument in arguments]
        own = [TINY, "--ckpt-rounds=2"] + ([f"--ckpt-target={self.target}"] if target else [])
        return self.run(sys.executable, "-m", "pytest", *own, *given, **options)

    def run(
        self,
        *command: object,
        when: Callable[[], bool] | None = None,
        send: signal.Signals = signal.SIGINT,
        cwd: Path | None = None,
    ) -> Result:
        """Run a command to its end; `seconds` count from the signal `send` where one is sent, once `when` is true."""
        token = uuid.uuid4().hex
        out = self.path / f"out-{token}"
        with out.open("wb") as file:
            process = subprocess.Popen(
                [*HEEDING_CTRL_C, *(str(part) for part in command)],
                cwd=cwd or self.path,
                env=self._environment(token),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                if when is not None:
                    wait_until(lambda: when() or process.poll() is not None)
                    process.send_signal(send)
                began = time.monotonic()
                status = process.wait(DEADLINE_S)
            finally:
                process.kill()
        seconds = time.monotonic() - began
        text = out.read_text(errors="replace")
        out.unlink()
        return Result(status, text, seconds, self.in_target(), _left_running(token))

    def ranks(self, size: int, *arguments: object, environment: dict[str, str] | None = None) -> RanksResult:
        """Run pytest in `size` ranks of a job, as torchrun would start them; stopped ones are killed at the end.

        Values of `environment` may hold `{rank}`.
        """
        token = uuid.uuid4().hex
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "pytest", TINY, "--ckpt-rounds=1", "--ckpt-probe=off"]
        command += [f"--ckpt-target={self.target}", *map(str, arguments)]
        job = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        outs = [self.path / f"out-{token}-{rank}" for rank in range(size)]
        processes = []
        began = time.monotonic()
        for rank, out in enumerate(outs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            given = {name: value.format(rank=rank) for name, value in (environment or {}).items()}
            with out.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        [*HEEDING_CTRL_C, *command],
                        cwd=self.path,
                        env={**self._environment(token), **job, **own, **given},
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        try:
            wait_until(lambda: all(_has_ended_or_stopped(process) for process in processes))
        finally:
            seconds = time.monotonic() - began
            for process in processes:
                process.kill()
        statuses = [process.wait(DEADLINE_S) for process in processes]
        texts = [out.read_text(errors="replace") for out in outs]
        for out in outs:
            out.unlink()
        return RanksResult(statuses, texts, seconds, self.in_target(), _left_running(token))

    def in_target(self) -> list[str]:
        """Return what lies in the target."""
        return sorted(entry.name for entry in self.target.iterdir())

    def last(self) -> dict[str, Any]:
        """Return the file of the last run."""
        file: dict[str, Any] = json.loads((self.path / ".pytest_cache/d/ckpt/last.json").read_text())
        return file

    def _environment(self, token: str) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(_HEREDITARY)}
        own = {"TMPDIR": str(self.temporary), "COLUMNS": "150", "PYTHONDONTWRITEBYTECODE": "1", "PROJECT_TOKEN": token}
        return {**inherited, **own, **self.environment}


def wait_until(condition: Callable[[], bool]) -> None:
    """Return once `condition` holds; `TimeoutError` past the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)


def _left_running(token: str) -> list[str]:
    """Return who still runs with the command's token in its environment; the kernel gets a moment to bury the dead."""
    for _ in range(30):
        left = [" ".join(process.cmdline()) for process in psutil.process_iter() if _has_token(process, token)]
        if not left:
            break
        time.sleep(0.1)
    return left


def _has_ended_or_stopped(process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        return True
    try:
        return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return True


def _has_token(process: psutil.Process, token: str) -> bool:
    try:
        return process.environ().get("PROJECT_TOKEN") == token and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
