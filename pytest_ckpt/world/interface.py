"""The seam between what is measured and where it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from pytest_ckpt.errors import CkptError


class World(Protocol):
    """The ranks of one process group: run a function on every rank, get one reply per rank, within a deadline.

    Spawned ranks, an already running torchrun world and a fake in tests all fit behind this; nothing else of the
    plugin knows how a rank is reached.
    """

    @property
    def size(self) -> int:
        """How many ranks."""
        ...

    @property
    def device(self) -> str:
        """Where the state lives: `cpu` or `cuda`."""
        ...

    @property
    def start_method(self) -> str:
        """How the ranks were started, which may change what is measured."""
        ...

    def run(
        self,
        function: Callable[..., Any],
        /,
        *,
        timeout_s: float | None = None,
        while_waiting: Callable[[], None] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Run `function(rank, **arguments)` on every rank and return the replies in the order of ranks.

        `function` lives at module level; arguments and replies are plain data. `while_waiting` is called now and
        then in the caller's process. Raises `RankFailure` when a rank dies, hangs past `timeout_s` or raises.
        """
        ...

    def renew(self) -> bool:
        """Let the next command find fresh ranks; False where these must stay, since a test ran functions of its own."""
        ...

    def close(self) -> None:
        """End all ranks; a closed world starts anew when it is used again."""
        ...


def hosts_of(world: World) -> tuple[int, ...]:
    """Return the number of each rank's host; empty where all ranks share one, as all but attached worlds' do."""
    hosts: tuple[int, ...] = getattr(world, "hosts", ())
    return hosts if any(hosts) else ()


class FailedRank(msgspec.Struct, kw_only=True):
    """One rank's part in a failure."""

    rank: int
    what: str
    """`raised`, `died`, `stuck`, or `waiting` for one that did nothing wrong."""
    phase: str
    cause: str
    traceback: str = ""
    stack: str = ""
    """Python stacks of all threads of a rank that did not answer."""
    log_tail: str = ""
    hints: list[str] = []
    is_usage: bool = False
    """Whether the cause is the user's input, a sentence for which no traceback is needed."""


class RankFailure(CkptError):
    """A command did not complete on all ranks: who, in which phase, why, with traceback and the tail of the log."""

    def __init__(self, failed: list[FailedRank]) -> None:
        self.failed = failed
        super().__init__("\n".join(self._lines()))

    @property
    def is_usage(self) -> bool:
        """Whether every rank at fault says that the user's input cannot be used."""
        return bool(self.culprits) and all(rank.is_usage for rank in self.culprits)

    @property
    def culprits(self) -> list[FailedRank]:
        """The ranks that raised, died or are stuck."""
        return [rank for rank in self.failed if rank.what != "waiting"]

    def _lines(self) -> list[str]:
        waiting = [rank for rank in self.failed if rank.what == "waiting"]
        lines = [f"rank {f.rank} {_VERBS.get(f.what, f.what)} in phase {f.phase!r}: {f.cause}" for f in self.culprits]
        lines += list(dict.fromkeys(f"hint: {hint}" for f in self.culprits for hint in f.hints))
        lines += [f"rank {f.rank} was waiting in phase {f.phase!r}: {f.cause}" for f in waiting]
        for f in self.culprits + waiting:
            for title, text in (
                (f"traceback of rank {f.rank}", f.traceback),
                (f"stack of rank {f.rank}", f.stack),
                (f"log of rank {f.rank} (tail)", f.log_tail),
            ):
                if text.strip():
                    lines += [f"--- {title} ---", text.strip("\n")]
        return lines


_VERBS = {"stuck": "is stuck"}
