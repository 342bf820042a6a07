"""The process of one rank: `python -m pytest_ckpt.world.rank SOCKET STATUS STORE PARENT`.

It depends on almost nothing of the plugin: it joins its process group, then runs what the command channel names.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

from pytest_ckpt.world.channel import Channel
from pytest_ckpt.world.context import Rank
from pytest_ckpt.world.functions import FunctionRef, resolve
from pytest_ckpt.world.status import StatusBoard

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, however it ends (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def main(socket_path: str, status_path: str, store_path: str, parent: int) -> None:
    """Serve commands until the channel closes."""
    die_with(parent)
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
        channel.send({"error": _describe(error, status)})
        raise
    channel.send({"value": "ready"})
    _serve(channel, rank)
    _leave()


def _join(number: int, setup: dict[str, Any], store_path: str, status: StatusBoard) -> Rank:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from pytest_ckpt.save import watch

    device = torch.device(setup["device"])
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    size = int(os.environ["WORLD_SIZE"])
    # The parent's deadline comes first: it can name rank and phase, gloo's own can name neither.
    timeout = timedelta(seconds=setup["timeout_s"] + 60)
    dist.init_process_group(
        setup["backend"], init_method=f"file://{store_path}", rank=number, world_size=size, timeout=timeout
    )
    watch.install(status)
    return Rank(
        rank=number,
        size=size,
        device=device,
        mesh=init_device_mesh(device.type, (size,), mesh_dim_names=("shard",)),
        control_group=dist.new_group(backend="gloo", timeout=timeout),
        save_group=dist.new_group(backend="gloo", timeout=timeout),
        status=status,
    )


def _serve(channel: Channel, rank: Rank) -> None:
    from pytest_ckpt.save import watch

    while True:
        try:
            command = channel.receive()
        except EOFError:
            return
        rank.status.clear()
        try:
            function = resolve(FunctionRef(*command["function"]), "function")
            with rank.status.phase(command["function"][1]):
                value = function(rank, **command["arguments"])
                watch.require_saves_finished()
            reply = {"value": value}
        except BaseException as error:
            reply = {"error": _describe(error, rank.status)}
        try:
            channel.send(reply)
        except TypeError as error:
            channel.send({"error": _describe(error, rank.status)})


def _describe(error: BaseException, status: StatusBoard) -> dict[str, Any]:
    from pytest_ckpt.save.failures import describe

    return {"at_s": time.monotonic(), "phase": status.text(), **describe(error)}


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    record(main)(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
