"""How the ranks of an attached world meet: rank 0 listens, tells where by the job's store, and the others come.

Each rank has two connections to rank 0: one for commands, one for signs of life. Both are their own, never the
measured process group; a process that ends closes them, on whatever host, and that is known at once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hmac
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_ckpt.errors import CkptError
from pytest_ckpt.world.channel import Channel
from pytest_ckpt.world.job import Job

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

JOIN_S = 300.0
"""Ranks get so long to come: what they import and collect takes as long as the slowest file system."""
BEAT_S = 1.0
"""A rank says so often that it lives, and within a tenth of a second that its phase changed."""
_LOOK_S = 0.1
_HELLO_S = 10.0
_KEY = "pytest-ckpt/address"


class CannotMeet(CkptError):
    """Not all ranks of the job came together."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of itself when it comes."""

    rank: int
    host: str
    """Host name."""
    place: str
    """Equal for ranks of one host, by the launcher's numbers of nodes where it has them."""
    kernel: str
    """Equal where process ids mean the same process, and paths the same file."""
    pid: int
    status_file: str
    """Where it notes what it is doing."""
    tests: list[str]
    """The ids of the tests that it collected, in order."""
    errors: int
    """How many modules it could not collect."""


def hello(job: Job, status_file: Path, tests: list[str], errors: int) -> Hello:
    """Return what this rank says of itself."""
    host, boot = socket.gethostname(), _read("/proc/sys/kernel/random/boot_id")
    return Hello(
        rank=job.rank,
        host=host,
        place=f"{host} {boot}" if job.node is None else str(job.node),
        kernel=f"{boot} {_namespace('pid')} {_namespace('mnt')}",
        pid=os.getpid(),
        status_file=str(status_file),
        tests=tests,
        errors=errors,
    )


def host_numbers(hellos: Iterable[Hello]) -> tuple[int, ...]:
    """Return the number of each rank's host, in the order in which hosts first appear."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(one.place, len(numbers)) for one in hellos)


def job_store(job: Job, number: int) -> Store:
    """Return the store that all ranks of the job share, below a name of this session, the process's `number`th."""
    import torch.distributed as dist

    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=JOIN_S)))  # type: ignore[attr-defined]
    except (dist.DistError, OSError, RuntimeError) as error:
        raise CannotMeet(
            f"the store of the job at {job.address}:{job.port} was not reached within {JOIN_S:.0f} s: {error}"
        ) from None
    return dist.PrefixStore(f"pytest-ckpt-{number}", store)  # type: ignore[attr-defined]


class Gate:
    """Rank 0's side: a port of its own, that only who read the secret in the job's store may enter."""

    def __init__(self, store: Store) -> None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=512)
        self._secret = secrets.token_hex(16)
        store.set(_KEY, f"{self._socket.getsockname()[1]} {self._secret}")

    def admit(self, size: int, deadline_s: float) -> dict[int, tuple[Channel, Channel, Hello]]:
        """Return the connections of ranks 1 to `size` - 1; `CannotMeet` names those that did not come in time."""
        links: dict[tuple[int, str], Channel] = {}
        hellos: dict[int, Hello] = {}
        deadline = time.monotonic() + deadline_s
        while len(links) < 2 * (size - 1):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                missing = ", ".join(str(rank) for rank in range(1, size) if rank not in hellos)
                raise CannotMeet(
                    f"rank {missing} did not come within {deadline_s:.0f} s: all ranks must run the same pytest "
                    "command, and collect the same tests"
                )
            self._socket.settimeout(left_s)
            with contextlib.suppress(OSError, EOFError, msgspec.MsgspecError):  # a stranger, or too late
                stream, _ = self._socket.accept()
                channel = Channel(_prompt(stream))
                said = channel.receive(_HELLO_S)
                if not hmac.compare_digest(str(said["secret"]), self._secret):
                    channel.close()
                    continue
                one = msgspec.convert(said["hello"], Hello)
                hellos[one.rank], links[one.rank, said["kind"]] = one, channel
        self._socket.close()
        return {rank: (links[rank, "commands"], links[rank, "beats"], one) for rank, one in hellos.items()}


def come(store: Store, job: Job, me: Hello) -> tuple[Channel, Channel]:
    """Return this rank's two connections to rank 0; `CannotMeet` where it is not reached."""
    try:
        port, secret = store.get(_KEY).decode().split()
        links = []
        for kind in ("commands", "beats"):
            stream = socket.create_connection((job.address, int(port)), timeout=JOIN_S)
            links.append(Channel(_prompt(stream)))
            links[-1].send({"secret": secret, "kind": kind, "hello": msgspec.to_builtins(me)}, JOIN_S)
    except (OSError, RuntimeError) as error:  # torch's store raises RuntimeErrors
        raise CannotMeet(f"rank {job.rank} did not reach rank 0 at {job.address}: {error}") from None
    return links[0], links[1]


@dataclass
class Pulse:
    """What was last heard of a rank."""

    phase: str = "joining"
    heard_s: float = field(default_factory=time.monotonic)
    """CLOCK_MONOTONIC of this process."""
    stacks: str | None = None
    wants_stacks: bool = False
    waits_for: str = ""
    """What it waits for rank 0 in; empty: it does not."""
    waits_s: float = 0.0
    """How long it had waited when it said so."""


class PulseReader:
    """Rank 0's side of the signs of life: a thread that notes and answers them."""

    def __init__(self, links: dict[int, Channel], own: Callable[[], dict[str, Any]]) -> None:
        """`own` returns what the others are told of rank 0: `place`, and `idle_s` since it last acted with them."""
        self._own = own
        self.pulses = {rank: Pulse() for rank in links}
        self._links = dict(links)
        self._closing = False
        self._thread = threading.Thread(target=self._read, name="ckpt-pulses", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        self._thread.join(2 * BEAT_S)
        for link in self._links.values():
            link.close()

    def _read(self) -> None:
        while not self._closing and self._links:
            ready = set(wait([link.fileno() for link in self._links.values()], timeout=BEAT_S / 2))
            for rank, link in [(r, one) for r, one in self._links.items() if one.fileno() in ready]:
                pulse = self.pulses[rank]
                try:
                    beat = link.receive(BEAT_S)
                    pulse.phase, pulse.heard_s = beat["phase"], time.monotonic()
                    pulse.stacks = beat.get("stacks") or pulse.stacks
                    pulse.waits_for, pulse.waits_s = beat["waits_for"], beat["waits_s"]
                    link.send({"stacks": pulse.wants_stacks, **self._own()}, BEAT_S)
                except TimeoutError:
                    continue
                except (EOFError, OSError):  # its command connection tells
                    del self._links[rank]


class Heart:
    """The other ranks' side: a thread that says what this rank is doing, and listens whether rank 0 answers."""

    def __init__(self, link: Channel, phase: Callable[[], str], waits: Callable[[], tuple[str, float]]) -> None:
        """`waits` returns what this rank waits for rank 0 in, and since when (CLOCK_MONOTONIC); empty: in nothing."""
        self.heard_s = self.rank_0_acted_s = time.monotonic()
        self.rank_0_place = "the start of the session"
        self._link, self._phase, self._waits = link, phase, waits
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ckpt-heart", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._link.shut_down()
        self._thread.join(BEAT_S)
        self._link.close()

    def _beat(self) -> None:
        said, said_s, wants_stacks = ("", ""), 0.0, False
        with contextlib.suppress(EOFError, OSError):  # rank 0 is gone: the command connection tells
            while not self._ended.wait(0 if wants_stacks else _LOOK_S):
                phase = self._phase()
                waits_for, since_s = self._waits()
                if (phase, waits_for) == said and time.monotonic() - said_s < BEAT_S and not wants_stacks:
                    continue
                beat = {"phase": phase, "waits_for": waits_for, "waits_s": time.monotonic() - since_s}
                if wants_stacks:
                    beat["stacks"] = own_stacks()
                self._link.send(beat)
                answer = self._link.receive()
                wants_stacks = answer["stacks"] and not wants_stacks
                said, said_s = (phase, waits_for), time.monotonic()
                self.heard_s, self.rank_0_place = said_s, answer["place"]
                self.rank_0_acted_s = said_s - answer["idle_s"]


def own_stacks() -> str:
    """Return the Python stacks of this process, without those of threads that only watch."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
    modules = ("control", "follower", "attached", "channel", "body_watch")
    ours = [f"/world/{module}.py" for module in modules]
    return "\n\n".join(block for block in text.split("\n\n") if not any(name in block for name in ours))


def send_quietly(link: Channel, message: dict[str, Any], timeout_s: float) -> None:
    """Send to whom may be gone or stopped: that is seen, and named, where something is awaited of it."""
    with contextlib.suppress(OSError):
        link.send(message, timeout_s)


def _prompt(stream: socket.socket) -> socket.socket:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path) as file:
        return file.read().strip()
    return ""


def _namespace(kind: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/ns/{kind}")
    return ""
