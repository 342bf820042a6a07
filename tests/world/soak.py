"""Many saves in a row in every mode: what is left over of each, and whether the last one loads back bit for bit.

    python -m tests.world.soak [SAVES]

Prints for each mode and number of ranks what the ranks held after a fifth of the saves and after all of them.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from pytest_ckpt.save.modes import MODES, why_unavailable
from pytest_ckpt.save.writers import file_system_writer
from pytest_ckpt.world import commands
from pytest_ckpt.world.context import Rank
from pytest_ckpt.world.functions import listed, reference
from pytest_ckpt.world.spawned import SpawnedWorld

MODEL = "llama3-tiny"
KINDS = ("processes", "threads", "descriptors", "segments", "memory")
ALLOWED_GROWTH = {"processes": 0, "threads": 0, "descriptors": 0, "segments": 0, "memory": 8 * 2**20}
"""Of one rank and its background process, from a fifth of the saves to the last; memory in bytes."""


def saves(rank: Rank, *, folder: str, first: int, count: int) -> dict[str, int]:
    """Save `count` times, each time into a folder of its own, and return what this rank holds afterwards."""
    for number in range(first, first + count):
        location = os.path.join(folder, str(number))
        commands.save_round(rank, location=location)
        if rank.rank == 0 and number:
            shutil.rmtree(os.path.join(folder, str(number - 1)), ignore_errors=True)
    return held()


def held() -> dict[str, int]:
    """Return what this process and its children hold."""
    own = psutil.Process()
    family = [own, *children(own)]
    return {
        "processes": len(family),
        "threads": sum(one.num_threads() for one in family),
        "descriptors": sum(one.num_fds() for one in family),
        "segments": sum(_segments(one.pid) for one in family),
        "memory": sum(one.memory_info().rss for one in family),
    }


def children(process: psutil.Process) -> list[psutil.Process]:
    """Return its children, without Python's own tracker of resources, which stays until its parent ends."""
    return [one for one in process.children(recursive=True) if "resource_tracker" not in " ".join(one.cmdline())]


def loads_back(rank: Rank, *, location: str) -> list[str]:
    """Load what was saved last over zeros, and return the keys that differ from what was saved."""
    import torch

    from pytest_ckpt.model import values

    state = rank.memory["state"].state_dict
    saved = {key: values.local(tensor).clone() for key, tensor in values.tensors(state)}
    with torch.no_grad():
        for _, tensor in values.tensors(state):
            values.local(tensor).zero_()
    rank.memory["engine"].load(state, location)
    return [key for key, tensor in values.tensors(state) if not torch.equal(values.local(tensor), saved[key])]


def after_closing(rank: Rank) -> dict[str, int]:
    """Close the engine and return what is still held."""
    commands.close_engine(rank)
    return held()


def soak(world: SpawnedWorld, mode: str, folder: Path, count: int) -> dict[str, Any]:
    """Save `count` times in `mode`; return what each rank held early, at the end, and after the engine was closed."""
    world.run(
        commands.prepare,
        model=MODEL,
        state="fp32-adamw",
        function=None,
        mode=mode,
        writer=_listed(),
    )
    early = max(2, count // 5)
    first = world.run(saves, folder=str(folder), first=0, count=early)
    last = world.run(saves, folder=str(folder), first=early, count=count - early)
    differing = world.run(loads_back, location=str(folder / str(count - 1)))
    closed = world.run(after_closing)
    return {
        "early": first,
        "late": last,
        "closed": closed,
        "differing": sorted({k for keys in differing for k in keys}),
    }


def growth(found: dict[str, Any]) -> dict[str, int]:
    """Return by how much each kind grew on the rank where it grew most."""
    return {
        kind: max(late[kind] - early[kind] for early, late in zip(found["early"], found["late"], strict=True))
        for kind in KINDS
    }


def _listed() -> list[Any]:
    ref = reference(file_system_writer, "writer")
    return listed(ref)


def _segments(pid: int) -> int:
    """Return how many shared memory segments a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return 0
    return len({line.split(maxsplit=5)[5] for line in maps.splitlines() if "/torch_" in line or "/dev/shm/" in line})


def main() -> None:
    """Soak every mode that this machine has, with 2 and with 4 ranks."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    for size in (2, 4):
        for mode in MODES:
            if why := why_unavailable(mode, "cpu"):
                print(f"{mode}: skipped: {why}")
                continue
            world = SpawnedWorld(size)
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = soak(world, mode, Path(folder), count)
                finally:
                    world.close()
            print(f"{mode}, {size} ranks, {count} saves: loads back: {found['differing'] or 'bit for bit'}")
            for kind in KINDS:
                early, late = (max(one[kind] for one in found[when]) for when in ("early", "late"))
                closed = max(one[kind] for one in found["closed"])
                print(f"    {kind:<12} {early:>12,} {late:>12,}   closed {closed:>12,}", flush=True)


if __name__ == "__main__":
    main()
