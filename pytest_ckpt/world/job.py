"""The job that this process is a rank of, as torchrun or srun tells it in the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from pytest_ckpt.errors import SettingError

JOINED = "PYTEST_CKPT_JOINED"
"""The process that has joined the job: what it starts, such as another pytest, is none of its ranks."""
_FIRST_PORT, _PORTS = 20_000, 10_000  # below those that the kernel gives to whoever asks for any
_FIRST_HOST = re.compile(r"(?P<head>[^\[,]+)(?:\[(?P<number>\d+)[^\]]*\](?P<tail>[^,]*))?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class Job:
    """A rank's place in a job whose ranks somebody else started."""

    rank: int
    size: int
    local_rank: int
    """Among the ranks of its node."""
    local_size: int
    """How many ranks its node has."""
    node: int | None
    """Which of the job's nodes, from zero; None where the launcher does not tell."""
    launcher: str
    """`torchrun` or `srun`."""
    address: str
    """Host name or address of rank 0's node."""
    port: int
    """Where the job's store listens, or shall."""

    def export(self, environ: MutableMapping[str, str]) -> None:
        """Put what `torch.distributed` reads into `environ`, where the launcher did not."""
        environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.size),
            LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.local_size),
            MASTER_ADDR=self.address,
            MASTER_PORT=str(self.port),
        )


def find_job(environ: Mapping[str, str]) -> Job | None:
    """Return the job that `environ` tells of; None where nobody started ranks. `SettingError` for what is no number.

    torchrun inside of srun is torchrun's. A job of one rank under torchrun is one too; under srun it is a plain run.
    """
    if environ.get(JOINED, str(os.getpid())) != str(os.getpid()):
        return None
    if all(environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return _of_torchrun(environ)
    if "SLURM_PROCID" in environ and environ.get("SLURM_STEP_ID") and _number(environ, *_STEP_TASKS, default=1) > 1:
        return _of_srun(environ)
    return None


def why_this_node_only(environ: Mapping[str, str]) -> str | None:
    """Return a sentence where this is a plain run inside a Slurm job of several nodes, else None."""
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    if not nodes.isdecimal() or int(nodes) < 2 or find_job(environ) is not None:
        return None
    return (
        f"this node only, of the {nodes} of Slurm job {environ.get('SLURM_JOB_ID', '?')}: "
        "`srun --ntasks-per-node=N python -m pytest ...` runs on all"
    )


_STEP_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


def _of_torchrun(environ: Mapping[str, str]) -> Job:
    return Job(
        rank=_number(environ, "RANK"),
        size=_number(environ, "WORLD_SIZE"),
        local_rank=_number(environ, "LOCAL_RANK", default=0),
        local_size=_number(environ, "LOCAL_WORLD_SIZE", default=1),
        node=_number(environ, "GROUP_RANK") if environ.get("GROUP_RANK") else None,
        launcher="torchrun",
        address=environ["MASTER_ADDR"],
        port=_number(environ, "MASTER_PORT"),
    )


def _of_srun(environ: Mapping[str, str]) -> Job:
    node = _number(environ, "SLURM_NODEID", default=0)
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "localhost"
    number = _number(environ, "SLURM_JOB_ID", default=0) * 16 + _number(environ, "SLURM_STEP_ID", default=0)
    given = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    return Job(
        rank=_number(environ, "SLURM_PROCID"),
        size=_number(environ, *_STEP_TASKS),
        local_rank=_number(environ, "SLURM_LOCALID", default=0),
        local_size=_tasks_of(node, environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")),
        node=node,
        launcher="srun",
        address=given[0] or first_host(hosts),
        port=int(given[1]) if given[1] and given[1].isdecimal() else _FIRST_PORT + number % _PORTS,
    )


def first_host(hosts: str) -> str:
    """Return the first host of Slurm's list, as in `node[003-006,009],gpu1`."""
    match = _FIRST_HOST.match(hosts)
    if match is None:
        return hosts
    return match["head"] + (match["number"] or "") + (match["tail"] or "")


def _tasks_of(node: int, tasks: str | None) -> int:
    """Return how many tasks Slurm's list, as in `8(x3),2`, gives the node of that number."""
    counts = [int(count) for count, times in _TASKS.findall(tasks or "") for _ in range(int(times or 1))]
    return counts[node] if node < len(counts) else 1


def _number(environ: Mapping[str, str], *names: str, default: int | None = None) -> int:
    for name in names:
        text = environ.get(name)
        if text:
            if not text.isdecimal():
                raise SettingError(f"{name}={text!r} in the environment is no number; start the ranks with torchrun")
            return int(text)
    if default is None:
        raise SettingError(f"{names[0]} is not in the environment; start the ranks with torchrun")
    return default
