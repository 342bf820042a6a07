"""What the tests of attached worlds run in ranks; copied beside their projects' tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

CULPRIT = int(os.environ.get("CULPRIT", "1"))


def echo(rank: Any, value: Any) -> list[Any]:
    return [rank.rank, value]


def pid(rank: Any) -> int:
    return os.getpid()


def raise_on_one(rank: Any) -> None:
    if rank.rank == CULPRIT:
        raise ValueError("planted")
    dist.barrier(group=rank.control_group)


def raise_on_all(rank: Any) -> None:
    raise ValueError("planted on all")


class _Signalled(FileSystemWriter):
    """Writes a first byte, then gets the signal that the environment names, on the culprit alone."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == CULPRIT:
            Path(self.path, "part").write_bytes(b"x")
            os.kill(os.getpid(), signal.Signals[os.environ["CULPRIT_GETS"]])
        return super().write_data(plan, planner)


def signalled(path: str) -> FileSystemWriter:
    return _Signalled(path)
