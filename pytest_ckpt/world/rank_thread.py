"""The thread of an attached rank in which its commands run.

pytest has the main thread, in which a collective that never ends could be interrupted by nobody: rank 0 would name no
stuck rank, and the others would never hear that the test is over.
"""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_ckpt.world.channel import Channel, encode
from pytest_ckpt.world.context import Rank
from pytest_ckpt.world.job import Job
from pytest_ckpt.world.rank import NEVER, describe_error, make_rank, own_device, reply_to
from pytest_ckpt.world.scratch import ScratchFolder
from pytest_ckpt.world.status import StatusBoard, create_status_file

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

IDLE = "idle"


class Reply(msgspec.Struct):
    """What a command came to on one rank, by the command's number."""

    id: int
    reply: msgspec.Raw


class RankThread:
    """Serves the commands `join`, `leave` and functions, in their order; `channel` takes them and gives the replies."""

    def __init__(self, job: Job, device: str, store: Store) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self._commands = Channel(theirs)
        self._job, self._device, self._store = job, device, store
        self._scratch = ScratchFolder()
        self.status_file = self._scratch.path / "status"
        create_status_file(self.status_file)
        self.status = StatusBoard(str(self.status_file))
        self._rank: Rank | None = None
        self._owns_group = True
        self._watched = False
        self._thread = threading.Thread(target=self._serve, name="ckpt-rank", daemon=True)
        self._thread.start()

    @property
    def owns_group(self) -> bool:
        """Whether the process group is ours, and not one that the tests had initialised."""
        return self._owns_group

    def close(self) -> bool:
        """End the thread and remove its folder; False where a command holds it, and the process must end without it."""
        self.channel.shut_down()
        self._thread.join(5)
        if not self._thread.is_alive():
            self.channel.close()
        self._scratch.remove()
        return not self._thread.is_alive()

    def _serve(self) -> None:
        self.status.main = threading.get_ident()
        while True:
            try:
                command = self._commands.receive()
            except (EOFError, OSError):
                with contextlib.suppress(Exception):  # the session is over
                    self._leave()
                return
            reply = self._reply(command)
            gc_needed = "leave" in command or b"error" in reply[:16]
            if gc_needed:  # what an exception's frames held keeps groups, and so the peers' collectives, open
                gc.collect()
            self.status.clear()
            try:
                self._commands.send_encoded(encode(Reply(command["id"], msgspec.Raw(reply))))
            except OSError:
                return

    def _reply(self, command: dict[str, Any]) -> bytes:
        if "function" in command:
            if self._rank is None:
                return encode({"value": None})  # unasked: the ranks have left since
            return reply_to(self._rank, command)
        try:
            if "join" in command:
                with self.status.phase("join the process group"):
                    self._join(command["join"])
            else:
                with self.status.phase("leave the process group"):
                    self._leave()
        except BaseException as error:
            return encode({"error": describe_error(error, self.status)})
        return encode({"value": self._owns_group})

    def _join(self, setup: dict[str, Any]) -> None:
        import torch.distributed as dist

        from pytest_ckpt.save import watch

        job = self._job
        device = own_device(self._device)
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            store = dist.PrefixStore(f"group-{setup['generation']}", self._store)  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.size, timeout=NEVER)
        elif (dist.get_rank(), dist.get_world_size()) != (job.rank, job.size):
            raise RuntimeError(
                f"the process group that the tests initialised has rank {dist.get_rank()} of {dist.get_world_size()} "
                f"here, and {job.launcher} says {job.rank} of {job.size}"
            )
        if not self._watched:
            watch.install(self.status)
            self._watched = True
        hosts = tuple(setup["hosts"])
        self._rank = make_rank(job.rank, job.size, device, self.status, str(self._scratch.path), hosts)

    def _leave(self) -> None:
        import torch.distributed as dist

        from pytest_ckpt.world.commands import release

        if self._rank is not None:
            release(self._rank)
        self._rank = None
        gc.collect()
        if self._owns_group and dist.is_initialized():
            # Its connections close, which ends what other ranks still wait for in it.
            dist.destroy_process_group()
