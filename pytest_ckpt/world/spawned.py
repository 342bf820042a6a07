"""The spawned world: this process starts the ranks, keeps them alive for later tests, and watches over them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgspec
import psutil

from pytest_ckpt.errors import CkptError
from pytest_ckpt.units import format_seconds
from pytest_ckpt.world.autopsy import Raised, examine
from pytest_ckpt.world.channel import Channel, Listener, encode
from pytest_ckpt.world.functions import listed, reference
from pytest_ckpt.world.process import RankProcess, take_stacks
from pytest_ckpt.world.scratch import ScratchFolder
from pytest_ckpt.world.status import create_status_file

_POLL_S = 0.2
_GRACE_S = 2.0
"""After the first failure the other ranks get this long to say what they saw."""
_START_S = 300.0
_START_LIMIT = f"the {_START_S:.0f} s that ranks get to start"
_FIRST_WORD_S = 10.0
_END_S = 4.0
_AFTERLIFE_S = 1.0
"""For what a rank leaves to do after its end: Python's resource tracker then removes shared memory."""


_RANK_PROGRAM = (
    # Without the working folder, whose modules could stand before Python's own; what this process finds comes last.
    "import json, sys; sys.path[:1] = sys.path[:1] * getattr(sys.flags, 'safe_path', False); "
    "sys.path += json.loads(sys.argv.pop(1)); from pytest_ckpt.world.rank import start; start()"
)


class SpawnedWorld:
    """N ranks on this host, programs of their own that this process starts and reaches over one Unix socket each.

    The ranks start with the first command and stay until `close`. After a failure they are ended to the last process,
    and the next command starts new ones. Unix sockets and a FileStore: no TCP port can collide.
    """

    start_method = "exec"
    """Each rank is a new program, neither forked nor spawned from this one."""

    def __init__(self, size: int, device: str = "cpu", timeout_s: float = 1800.0) -> None:
        self.size = size
        self.device = device
        self.timeout_s = timeout_s
        self._processes: list[RankProcess] = []
        self._channels: list[Channel] = []
        self._scratch: ScratchFolder | None = None
        self._holds_others_state = False

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids; empty while none are running."""
        return [process.pid for process in self._processes]

    @property
    def backend(self) -> str:
        """The process group's backends, as `torch.distributed.init_process_group` takes them."""
        return "cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo"

    def run(
        self,
        function: Callable[..., Any],
        /,
        *,
        timeout_s: float | None = None,
        while_waiting: Callable[[], None] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """See `World.run`. The deadline is `timeout_s`, or the world's own; starting the ranks has one apart."""
        ref = reference(function, "function")
        # Before any rank is started or told: what is no plain data leaves the world as it was.
        command = encode({"function": listed(ref), "arguments": arguments})
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            if not self._processes:
                self._start(while_waiting)
            self._holds_others_state |= not ref.module.startswith("pytest_ckpt.")
            return self._tell(command, timeout_s, f"{format_seconds(timeout_s)} (--ckpt-timeout)", while_waiting)
        except BaseException:  # Ctrl-C too: no rank may go on with a command nobody waits for
            self._destroy()
            raise

    def renew(self) -> bool:
        """See `World.renew`."""
        if self._holds_others_state:
            return False
        self.close()
        return True

    def close(self) -> None:
        """End the ranks: politely, then for good."""
        for channel in self._channels:
            channel.close()
        deadline = time.monotonic() + _END_S
        while any(process.is_running() for process in self._processes) and time.monotonic() < deadline:
            time.sleep(0.02)
        deadline = time.monotonic() + _AFTERLIFE_S
        while any(process.has_left_others() for process in self._processes) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._destroy()

    def _start(self, while_waiting: Callable[[], None] | None) -> None:
        self._scratch = ScratchFolder()
        folder = self._scratch.path
        socket_path = str(folder / "socket")
        with Listener(socket_path) as listener:
            for rank in range(self.size):
                self._processes.append(self._start_rank(rank, folder, socket_path))
            self._channels = self._accept(listener)
        setup = {
            "sys_path": [os.path.abspath(entry) for entry in sys.path],
            "backend": self.backend,
            "device": self.device,
        }
        self._tell(encode(setup), _START_S, _START_LIMIT, while_waiting)

    def _start_rank(self, rank: int, folder: Path, socket_path: str) -> RankProcess:
        status_file, stdout, stderr = (folder / f"{name}{rank}" for name in ("status", "stdout", "stderr"))
        create_status_file(status_file)
        found = [str(Path(__file__).parents[2]), *(os.path.abspath(entry) for entry in sys.path if entry)]
        with open(stdout, "ab") as out, open(stderr, "ab") as err:
            popen = _popen(
                rank,
                (
                    *(sys.executable, "-c", _RANK_PROGRAM, json.dumps(found)),
                    *(socket_path, str(status_file), str(folder / "store"), str(os.getpid())),
                ),
                env=os.environ | self._environment(rank),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # Ctrl-C is this process's to handle, and all that a rank started ends with it
            )
        return RankProcess(rank=rank, popen=popen, status_file=status_file, stdout=stdout, stderr=stderr)

    def _environment(self, rank: int) -> dict[str, str]:
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            # DCP's process mode opens a TCPStore of its own there; an unresolvable host name hung it.
            "MASTER_ADDR": "127.0.0.1",
        }
        if "OMP_NUM_THREADS" not in os.environ and self.size > 1:
            environment["OMP_NUM_THREADS"] = "1"  # as torchrun does, so that figures are those of a real job
        return environment

    def _accept(self, listener: Listener) -> list[Channel]:
        channels: dict[int, Channel] = {}
        deadline = time.monotonic() + _START_S
        while len(channels) < self.size:
            channel = listener.accept(_POLL_S)
            if channel is not None:
                with contextlib.suppress(EOFError, TimeoutError):  # dead or stopped by now: named below
                    channels[channel.receive(_FIRST_WORD_S)["rank"]] = channel
                continue
            missing = [process for process in self._processes if process.rank not in channels]
            died = {process.rank for process in missing if not process.is_running()}
            if died or time.monotonic() > deadline:
                raise examine(self._processes, {}, died, {p.rank for p in missing} - died, _START_LIMIT, take_stacks)
        return [channels[rank] for rank in range(self.size)]

    def _tell(
        self, message: bytes, timeout_s: float, limit: str, while_waiting: Callable[[], None] | None
    ) -> list[Any]:
        """Send every rank the message and return their replies in order, or raise what `examine` finds."""
        deadline = time.monotonic() + timeout_s
        for channel in self._channels:
            with contextlib.suppress(OSError):  # dead or stopped: seen, and named, below
                channel.send_encoded(message, timeout_s)
        waiting: dict[Channel, RankProcess] = dict(zip(self._channels, self._processes, strict=True))
        values: dict[int, Any] = {}
        raised: dict[int, Raised] = {}
        died: set[int] = set()
        while waiting and (remaining_s := deadline - time.monotonic()) > 0:
            ready = wait([channel.fileno() for channel in waiting], timeout=min(remaining_s, _POLL_S))
            for channel in [c for c in waiting if c.fileno() in ready] or _ended(waiting):
                try:
                    reply = channel.receive(remaining_s)
                except TimeoutError:  # in the middle of its reply
                    continue
                except EOFError:
                    reply = {}
                rank = waiting.pop(channel).rank
                if "value" in reply:
                    values[rank] = reply["value"]
                    continue
                deadline = min(deadline, time.monotonic() + _GRACE_S)
                if "error" in reply:
                    raised[rank] = msgspec.convert(reply["error"], Raised)
                else:
                    died.add(rank)
            if while_waiting is not None and not raised and not died:
                while_waiting()
        if waiting or raised or died:
            silent = {process.rank for process in waiting.values()}
            raise examine(self._processes, raised, died, silent, limit, take_stacks)
        return [values[rank] for rank in range(self.size)]

    def _destroy(self) -> None:
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.reap(_END_S)
        if self._scratch is not None:
            _kill_strays(self._scratch.path)
            self._scratch.remove()
        self._channels, self._scratch, self._processes = [], None, []
        self._holds_others_state = False


def _ended(waiting: dict[Channel, RankProcess]) -> list[Channel]:
    """Return the channels of ranks that have ended, which their own children may hold open."""
    ended = [channel for channel, process in waiting.items() if not process.is_running()]
    for channel in ended:
        channel.shut_down()
    return ended


def _popen(rank: int, command: Sequence[str], **given: Any) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, **given)
    except OSError as error:
        raise CkptError(f"rank {rank} cannot be started: {error}; see the limits of processes and memory") from error


def _kill_strays(scratch: Path) -> None:
    """Kill ranks that were started and never noted: an interrupt came in between."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any(argument.startswith(str(scratch)) for argument in child.cmdline()):
                child.kill()
                child.wait(_END_S)
