"""The process of one rank, whose arguments are SOCKET STATUS STORE PARENT.

It depends on almost nothing of the plugin: it joins its process group, then runs what the command channel names.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pytest_ckpt.world.channel import Channel, encode
from pytest_ckpt.world.context import Rank
from pytest_ckpt.world.functions import FunctionRef, resolve
from pytest_ckpt.world.status import StatusBoard

if TYPE_CHECKING:
    import torch

_PR_SET_PDEATHSIG = 1
NEVER = timedelta(days=20)
"""For groups: the controller's deadline comes first, and gloo's own can name neither rank nor phase."""


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, however it ends (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def start() -> None:
    """Run the rank that the command line describes."""
    socket_path, status_path, store_path, parent = sys.argv[1:]
    die_with(int(parent))  # before torch is imported, which takes seconds
    main(socket_path, status_path, store_path)
    _end()


def main(socket_path: str, status_path: str, store_path: str) -> None:
    """Serve commands until the channel closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    status = StatusBoard(status_path)
    channel = Channel.connect(socket_path)
    number = int(os.environ["RANK"])
    channel.send({"rank": number, "pid": os.getpid()})
    setup = channel.receive()
    sys.path[:] = setup["sys_path"]
    try:
        with status.phase("join the process group"):
            rank = _join(number, setup, store_path, status)
    except BaseException as error:
        channel.send({"error": describe_error(error, status)})
        return
    channel.send({"value": "ready"})
    _serve(channel, rank)
    _leave()


def _join(number: int, setup: dict[str, Any], store_path: str, status: StatusBoard) -> Rank:
    import torch.distributed as dist

    from pytest_ckpt.save import watch

    device = own_device(setup["device"])
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        setup["backend"], init_method=f"file://{store_path}", rank=number, world_size=size, timeout=NEVER
    )
    watch.install(status)
    return make_rank(number, size, device, status, os.path.dirname(store_path))


def own_device(name: str) -> torch.device:
    """Return this rank's device of the kind `name`, and make it the calling thread's current one."""
    import torch

    device = torch.device(name)
    if device.type == "cuda":
        # A launcher may show each rank its own GPU alone, which is then number 0.
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device


def make_rank(
    number: int, size: int, device: torch.device, status: StatusBoard, scratch: str, hosts: tuple[int, ...] = ()
) -> Rank:
    """Return this rank's context, with groups of its own in the process group, which all ranks are in by now."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    return Rank(
        rank=number,
        size=size,
        device=device,
        mesh=init_device_mesh(device.type, (size,), mesh_dim_names=("shard",)),
        control_group=dist.new_group(backend="gloo", timeout=NEVER),
        save_group=dist.new_group(backend="gloo", timeout=NEVER),
        status=status,
        scratch=scratch,
        hosts=hosts,
    )


def _serve(channel: Channel, rank: Rank) -> None:
    while True:
        try:
            command = channel.receive()
        except EOFError:
            return
        rank.status.clear()
        reply = reply_to(rank, command)
        with rank.status.phase("send the reply"):
            channel.send_encoded(reply)


def reply_to(rank: Rank, command: dict[str, Any]) -> bytes:
    """Run what `command` names and return the encoded reply: its value, or what it raised."""
    from pytest_ckpt.save import watch

    name = command["function"][1]
    try:
        with rank.status.phase(name):
            function = resolve(FunctionRef(*command["function"]), "function")
            value = function(rank, **command["arguments"])
            watch.require_saves_finished()
            try:
                return encode({"value": value})
            except TypeError as error:
                raise TypeError(f"{name} returned what is no plain data and stays in its rank: {error}") from None
    except BaseException as error:
        return encode({"error": describe_error(error, rank.status, rank.memory)})


def describe_error(error: BaseException, status: StatusBoard, memory: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what the controller is told of an exception in this rank."""
    from pytest_ckpt.save.failures import describe

    memory = memory or {}
    described = describe(error, memory.get("location"), getattr(memory.get("state"), "logical_bytes", None))
    return {"at_s": time.monotonic(), "phase": status.phase_of(error), **described}


def _end() -> None:
    """End this program, but for taking apart all that it imported, which takes torch half a second."""
    threading._shutdown()  # type: ignore[attr-defined]  # what is still to be done in pools and other threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
