"""The spawned world: this process starts the ranks, keeps them alive for later tests, and watches over them."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from pytest_ckpt.world.channel import Channel, Listener
from pytest_ckpt.world.functions import reference
from pytest_ckpt.world.interface import FailedRank, RankFailure
from pytest_ckpt.world.status import create_status_file, read_status

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

_POLL_S = 0.2
_GRACE_S = 3.0
"""After the first failure the other ranks get this long to say what they saw."""
_START_S = 300.0
_END_S = 5.0
_LOG_LINES = 20


class SpawnedWorld:
    """N ranks on this host, started by torch's elastic multiprocessing, reached over one Unix socket each.

    The ranks start with the first command and stay until `close`. After a failure they are ended to the last process,
    and the next command starts new ones. Unix sockets and a FileStore: no TCP port can collide.
    """

    def __init__(self, size: int, device: str = "cpu", timeout_s: float = 1800.0) -> None:
        self.size = size
        self.device = device
        self.timeout_s = timeout_s
        self.pids: list[int] = []
        self._context: PContext | None = None
        self._channels: list[Channel] = []
        self._folder: Path | None = None

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
        try:
            if self._context is None:
                self._start(while_waiting)
            for channel in self._channels:
                channel.send({"function": [ref.module, ref.name, ref.file], "arguments": arguments})
            return self._gather(timeout_s or self.timeout_s, while_waiting)
        except TypeError:  # an argument that is no plain data: nothing was sent
            raise
        except BaseException:  # Ctrl-C too: no rank may go on with a command nobody waits for
            self._destroy()
            raise

    def close(self) -> None:
        """End the ranks: politely, then for good."""
        for channel in self._channels:
            channel.close()
        if self._context is not None:
            gone, alive = psutil.wait_procs(self._processes(), timeout=_END_S)
            del gone, alive
        self._destroy()

    def _start(self, while_waiting: Callable[[], None] | None) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

        self._folder = _short_temporary_folder()
        socket_path = str(self._folder / "socket")
        listener = Listener(socket_path)
        ranks = range(self.size)
        for rank in ranks:
            create_status_file(self._status_file(rank))
        arguments = {
            rank: (
                *("-m", "pytest_ckpt.world.rank", socket_path, str(self._status_file(rank))),
                *(str(self._folder / "store"), str(os.getpid())),
            )
            for rank in ranks
        }
        with _own_signal_handlers_kept(), _elastic_quiet():
            self._context = start_processes(
                name="ckpt",
                entrypoint=sys.executable,
                args=arguments,
                envs={rank: self._environment(rank) for rank in ranks},
                logs_specs=DefaultLogsSpecs(log_dir=str(self._folder / "logs"), redirects=Std.ALL),
            )
        pids = self._context.pids()
        self.pids = [pids[rank] for rank in ranks]
        try:
            self._channels = self._accept(listener)
        finally:
            listener.close()
        setup = {
            "sys_path": [os.path.abspath(entry) for entry in sys.path],
            "backend": self.backend,
            "device": self.device,
            "timeout_s": self.timeout_s,
        }
        for channel in self._channels:
            channel.send(setup)
        self._gather(_START_S, while_waiting)

    def _environment(self, rank: int) -> dict[str, str]:
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            # DCP's process mode opens a TCPStore of its own there; an unresolvable host name hung it.
            "MASTER_ADDR": "127.0.0.1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
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
                channels[channel.receive()["rank"]] = channel
                continue
            missing = sorted(set(range(self.size)) - set(channels))
            dead = [rank for rank in missing if not _is_running(self.pids[rank])]
            if dead or time.monotonic() > deadline:
                raise self._failure({rank: {"died": True} for rank in dead or missing}, missing)
        return [channels[rank] for rank in range(self.size)]

    def _gather(self, timeout_s: float, while_waiting: Callable[[], None] | None) -> list[Any]:
        waiting = {channel.connection: rank for rank, channel in enumerate(self._channels)}
        values: dict[int, Any] = {}
        failures: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while waiting:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                break
            for ready in connection.wait(list(waiting), timeout=min(remaining_s, _POLL_S)):
                rank = waiting.pop(ready)  # type: ignore[call-overload]
                try:
                    reply = self._channels[rank].receive()
                except EOFError:
                    reply = {"died": True}
                if "value" in reply:
                    values[rank] = reply["value"]
                    continue
                if not failures:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                failures[rank] = reply
            if while_waiting is not None and not failures:
                while_waiting()
        if failures or waiting:
            raise self._failure(failures, sorted(waiting.values()), timeout_s)
        return [values[rank] for rank in range(self.size)]

    def _failure(self, failures: dict[int, dict[str, Any]], waiting: list[int], timeout_s: float = 0) -> RankFailure:
        """Return who failed, while the processes still stand: stacks, states and phases are read from them."""
        pending = [rank for rank in waiting if rank not in failures]
        stacks = self._stacks(pending)
        states = {rank: _process_state(self.pids[rank]) for rank in pending}
        phases = {rank: read_status(self._status_file(rank)).phase for rank in range(self.size)}
        stuck = [] if failures else _stuck_ranks(pending, states, phases)
        failed = []
        for rank, reply in sorted(failures.items()):
            failed.append(self._died(rank, phases[rank]) if "died" in reply else self._raised(rank, reply))
        for rank in pending:
            what = "stuck" if rank in stuck else "waiting"
            cause = f"no reply within {timeout_s:.0f} s (--ckpt-timeout); process {states[rank]}"
            if what == "waiting":
                cause = f"process {states[rank]}"
            failed.append(
                FailedRank(
                    rank=rank,
                    what=what,
                    phase=phases[rank],
                    cause=cause,
                    log_tail=stacks[rank],
                    hints=_phase_hints(phases[rank]) if what == "stuck" else [],
                )
            )
        return RankFailure(_blame_origins(failed, failures))

    def _died(self, rank: int, phase: str) -> FailedRank:
        code = self._exit_code(rank)
        if code is not None and code < 0:
            cause = f"killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                cause += " (by hand, or by the kernel when memory ran out: see dmesg)"
        else:
            cause = f"exited with status {code}"
        return FailedRank(rank=rank, what="died", phase=phase, cause=cause, log_tail=self._log_tail(rank))

    def _raised(self, rank: int, reply: dict[str, Any]) -> FailedRank:
        error = reply["error"]
        return FailedRank(
            rank=rank,
            what="raised",
            phase=error["phase"],
            cause=error["cause"],
            traceback=error["traceback"],
            log_tail=self._log_tail(rank),
            hints=error["hints"],
        )

    def _exit_code(self, rank: int) -> int | None:
        """Return the exit status of a rank whose channel closed, from torch's own bookkeeping."""
        from torch.distributed.elastic.multiprocessing import SubprocessContext

        assert isinstance(self._context, SubprocessContext)
        process = self._context.subprocess_handlers[rank].proc
        with contextlib.suppress(Exception):
            process.wait(timeout=1)
        code: int | None = process.returncode
        return code

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Return the Python stacks of these ranks, which `faulthandler` writes to their logs at SIGUSR1."""
        before = {
            rank: self._log(rank, "stderr").stat().st_size for rank in ranks if self._log(rank, "stderr").exists()
        }
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)
        if ranks:
            time.sleep(0.5)
        stacks = {}
        for rank in ranks:
            with contextlib.suppress(OSError):
                written = self._log(rank, "stderr").read_bytes()[before.get(rank, 0) :]
                stacks[rank] = written.decode(errors="replace")
        return {rank: stacks.get(rank) or self._log_tail(rank) for rank in ranks}

    def _log(self, rank: int, stream: str) -> Path:
        assert self._context is not None
        return Path((self._context.stderrs if stream == "stderr" else self._context.stdouts)[rank])

    def _log_tail(self, rank: int) -> str:
        lines: list[str] = []
        for stream in ("stdout", "stderr"):
            with contextlib.suppress(OSError):
                lines += self._log(rank, stream).read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "\n".join(lines)

    def _status_file(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"status{rank}"

    def _processes(self) -> list[psutil.Process]:
        processes = []
        for pid in self.pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(pid))
        return processes

    def _destroy(self) -> None:
        for channel in self._channels:
            channel.close()
        if self._context is not None:
            descendants = [child for process in self._processes() for child in process.children(recursive=True)]
            with _elastic_quiet():
                self._context.close(signal.SIGKILL, timeout=int(_END_S))
            for child in descendants:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._channels, self._context, self._folder, self.pids = [], None, None, []


def _blame_origins(failed: list[FailedRank], replies: dict[int, dict[str, Any]]) -> list[FailedRank]:
    """Return the failures with the ranks in which they began first, and those they only spread to as waiting.

    DCP raises one rank's error on all of them, and gloo reports a lost peer where the peer is the fault.
    """
    dead = {f.rank for f in failed if f.what == "died"}
    named = {rank for reply in replies.values() for rank in reply.get("error", {}).get("origins", [])}
    origins = dead | (named & {f.rank for f in failed})
    if not origins:
        raised = [(reply["error"]["at_s"], rank) for rank, reply in replies.items() if "error" in reply]
        lost_peer = {rank for rank, reply in replies.items() if reply.get("error", {}).get("lost_peer")}
        origins = {rank for _, rank in raised if rank not in lost_peer} or {rank for _, rank in raised[:1]}
    if not origins:
        return failed
    blamed = [f for f in failed if f.rank in origins]
    others = [
        FailedRank(
            rank=f.rank,
            what="waiting",
            phase=f.phase,
            cause=f"then {f.cause}" if f.what == "raised" else f.cause,
        )
        for f in failed
        if f.rank not in origins
    ]
    return blamed + others


def _stuck_ranks(pending: list[int], states: dict[int, str], phases: dict[int, str]) -> list[int]:
    """Return which of the silent ranks hold up the others: stopped ones, else those at work, else all of them."""
    stopped = [rank for rank in pending if "stop" in states[rank]]
    at_work = [rank for rank in pending if not phases[rank].endswith(("barrier", "save", "async_save"))]
    return stopped or at_work or pending


def _phase_hints(phase: str) -> list[str]:
    if "training's group" in phase:
        return [
            "an async save was started on the process group that training uses; collectives of both interleave and "
            "deadlock: give the save a dedicated gloo group (process_group=...)"
        ]
    return []


def _process_state(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"


def _is_running(pid: int) -> bool:
    return _process_state(pid) not in ("gone", psutil.STATUS_ZOMBIE)


def _short_temporary_folder() -> Path:
    """Return a private folder whose socket paths stay under the 108 bytes that Unix allows."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="ckpt-world-", dir=base if len(base) < 60 else "/tmp"))


@contextlib.contextmanager
def _own_signal_handlers_kept() -> Iterator[None]:
    """Put back the handlers that torch elastic replaces when it starts processes from the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)


@contextlib.contextmanager
def _elastic_quiet() -> Iterator[None]:
    """Keep elastic's log of what we do on purpose (ending ranks) off the screen."""
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
