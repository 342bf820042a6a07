"""The two sides that are compared: the plugin's own path to a save, and the bare torchrun script."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil

from pytest_ckpt.save.writers import file_system_writer
from pytest_ckpt.target.path import open_target
from pytest_ckpt.target.spec import TargetSpec
from pytest_ckpt.world import commands
from pytest_ckpt.world.context import Rank
from pytest_ckpt.world.functions import listed, reference
from pytest_ckpt.world.spawned import SpawnedWorld

from .bare_save import ANSWER

MODES = ("sync", "async")
_POLL_S = 0.5  # how often the plugin's progress line looks at the folder on a terminal
_END_S = 30.0


class Timed(NamedTuple):
    """A save: when the first rank called and the last was done (CLOCK_MONOTONIC), and the longest stall of a rank."""

    began_s: float
    ended_s: float
    stall_s: float

    @property
    def save_s(self) -> float:
        return self.ended_s - self.began_s


class Side(Protocol):
    """One way of saving, whose ranks stay alive from save to save."""

    name: str
    pids: list[int]
    """The ranks."""

    def save(self, mode: str) -> Timed:
        """Save once into a fresh folder and delete it again, outside what is timed."""
        ...

    def close(self) -> None:
        """End the ranks; leave nothing behind."""
        ...


def default_writer() -> list[Any]:
    """Return the reference of FileSystemWriter's factory, as commands take it."""
    ref = reference(file_system_writer, "writer")
    return listed(ref)


def process_id(rank: Rank) -> dict[str, int]:
    return {"pid": os.getpid()}


class Plugin:
    """SpawnedWorld and its commands, as `pytest_ckpt.world.rounds` uses them, in a work folder of the plugin."""

    name = "plugin"

    def __init__(self, options: argparse.Namespace, root: Path) -> None:
        self._folder = open_target(TargetSpec("speed", str(root), source="tests/speed")).open()
        self._world = SpawnedWorld(options.ranks, "cpu", options.timeout)
        self._given = {"model": options.model, "state": options.state, "function": None}
        self._mode = ""
        try:
            self._world.run(commands.prepare, **self._given)
        except BaseException:
            self.close()
            raise
        self.pids = list(self._world.pids)

    def save(self, mode: str) -> Timed:
        if mode != self._mode:
            self._world.run(commands.prepare, **self._given, mode=mode, writer=default_writer())
            self._mode = mode
        location = self._folder.new_round(mode)
        last_look = time.monotonic()

        def look() -> None:
            nonlocal last_look
            if time.monotonic() - last_look >= _POLL_S:
                last_look = time.monotonic()
                with contextlib.suppress(OSError):
                    self._folder.bytes_in(location)

        replies = self._world.run(
            commands.save_round,
            while_waiting=look,
            location=location,
        )
        self._folder.remove(location)
        return _timed(replies)

    def close(self) -> None:
        self._world.close()
        self._folder.close()


class Bare:
    """`torchrun bare_save.py`, commanded over its stdin."""

    name = "bare"
    script = "bare_save"

    def __init__(self, options: argparse.Namespace, root: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="bare-", dir=root))
        self._timeout_s = options.timeout
        self._count = 0
        self._log = open(self._folder / "stderr", "w+")  # noqa: SIM115  closed in close()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
                *(
                    f"--log-dir={self._folder}",
                    f"--nproc-per-node={options.ranks}",
                    *("-m", f"tests.speed.{self.script}"),
                ),
                *(f"--model={options.model}", f"--state={options.state}"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=Path(__file__).parents[2],
            start_new_session=True,  # Ctrl-C is this process's to handle
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.pids = [reply["pid"] for reply in self._answer()]
        except BaseException:
            self.close()
            raise

    def save(self, mode: str) -> Timed:
        self._count += 1
        location = self._folder / f"{self._count:04d}-{mode}"
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"mode": mode, "location": str(location)}) + "\n")
        self._process.stdin.flush()
        timed = _timed(self._answer())
        shutil.rmtree(location)
        return timed

    def close(self) -> None:
        assert self._process.stdin is not None
        processes = _family(self._process.pid)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        for process in processes:  # those of them that are gone are passed over
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                self._lines.put(line.removeprefix(ANSWER))
        self._lines.put(None)

    def _answer(self) -> list[dict[str, Any]]:
        try:
            line = self._lines.get(timeout=self._timeout_s)
        except queue.Empty:
            raise SystemExit(f"{self.script}.py did not answer within {self._timeout_s:.0f} s") from None
        if line is None:
            self._log.seek(0)
            raise SystemExit(f"{self.script}.py ended:\n{self._log.read()[-4000:]}")
        replies: list[dict[str, Any]] = json.loads(line)
        return replies


class Attached(Bare):
    """The plugin's own path where torchrun started the ranks: `torchrun attached_save.py`, commanded over its stdin."""

    name = "attached"
    script = "attached_save"


def add_options(parser: argparse.ArgumentParser, model: str, target: str) -> None:
    """Declare what both sides need to know."""
    parser.add_argument("--model", default=model, help="geometry (default: %(default)s)")
    parser.add_argument("--state", default="fp32-adamw", help="state recipe (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each side (default: %(default)s)")
    parser.add_argument("--target", default=target, help="folder to save below (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one command (default: %(default)s)")


@contextlib.contextmanager
def fresh_root(options: argparse.Namespace) -> Iterator[Path]:
    """Make a folder below the target for all that is saved, and remove it however the block ends.

    Both sides get one number of threads: what torchrun sets for itself, unless OMP_NUM_THREADS says otherwise.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    root = Path(tempfile.mkdtemp(prefix="ckpt-speed-", dir=options.target))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _timed(replies: list[dict[str, Any]]) -> Timed:
    """Return the figures as DESIGN.md 3 defines them, for both sides alike."""
    return Timed(
        began_s=min(reply["called_s"] for reply in replies),
        ended_s=max(reply["completed_s"] for reply in replies),
        stall_s=max(reply["returned_s"] - reply["called_s"] for reply in replies),
    )


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
