"""The probes over all ranks: what runs in a rank, and the controller's side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec

from pytest_ckpt.measure.io_probes import (
    LEAST_BYTES,
    MAX_BYTES,
    MAX_SECONDS,
    Reading,
    WriteMode,
    combine,
    copy_probe,
    write_probe,
    zeros_probe,
)
from pytest_ckpt.measure.memory import available_memory_bytes
from pytest_ckpt.records import Probe, Probes
from pytest_ckpt.target.interface import WorkFolder
from pytest_ckpt.world.context import Rank
from pytest_ckpt.world.interface import World
from pytest_ckpt.world.rounds import Progress

STORAGE_PROBES = ("write_direct", "write_synced", "write_buffered")
"""Buffered last: what the kernel began to write back must not slow down another."""
HOST_PROBES = ("copy", "copy_warm", "serialize")
CUDA_PROBES = ("d2h_pinned", "d2h_pageable")
_MODES: dict[str, WriteMode] = {"write_direct": "direct", "write_synced": "synced", "write_buffered": "buffered"}
_LABELS = {
    "write_direct": "direct writes",
    "write_synced": "synced writes",
    "write_buffered": "buffered writes",
    "copy": "copies into fresh memory",
    "copy_warm": "copies into used memory",
    "serialize": "serialisation to nowhere",
    "d2h_pinned": "device to pinned host memory",
    "d2h_pageable": "device to pageable host memory",
}


def run_probes(
    world: World,
    folder: WorkFolder,
    progress: Progress,
    *,
    max_bytes: int = MAX_BYTES,
    max_seconds: float = MAX_SECONDS,
    host: Probes | None = None,
) -> Probes:
    """Run every probe on all ranks of `world` at once, the writes into a fresh location of `folder`.

    Each takes at most `max_bytes` over all ranks (less where space or memory are short) or `max_seconds`, whichever is
    reached first. `host`, an earlier result of the same world, saves measuring again what has nothing to do with the
    target. Raises `RankFailure` as `World.run` does; nothing is left in `folder` either way.
    """
    names = HOST_PROBES + (CUDA_PROBES if world.device == "cuda" else ())
    location = folder.new_round("probe")
    os.mkdir(location, 0o700)
    try:
        max_bytes = _affordable(location, max_bytes)
        details = _measure(world, STORAGE_PROBES, progress, location, max_bytes, max_seconds)
        if host is None:
            details += _measure(world, names, progress, None, max_bytes, max_seconds)
        else:
            details += [probe for probe in host.details if probe.name in names]
    finally:
        folder.remove(location)
        progress.done()
    return Probes(**{f"{probe.name}_Bps": probe.Bps for probe in details}, world_size=world.size, details=details)


def run_misleading_probes(
    folder: WorkFolder,
    checkpoint: str | None = None,
    *,
    max_bytes: int = MAX_BYTES,
    max_seconds: float = MAX_SECONDS,
) -> list[Probe]:
    """Measure in this process what people try first: `dd` of zeros, and `cp` of the saved `checkpoint`, if given one.

    Both end in the page cache; they are shown beside the honest figures and bound nothing.
    """
    location = folder.new_round("misleading")
    os.mkdir(location, 0o700)
    try:
        max_bytes = _affordable(location, max_bytes)
        probes = [zeros_probe(os.path.join(location, "zeros"), max_bytes=max_bytes, max_seconds=max_seconds)]
        if checkpoint is not None:
            path = os.path.join(location, "copy")
            probes.append(copy_probe(checkpoint, path, max_bytes=max_bytes, max_seconds=max_seconds))
    finally:
        folder.remove(location)
    return probes


def probe_rank(rank: Rank, *, name: str, location: str | None, max_bytes: int, max_seconds: float) -> dict[str, Any]:
    """Make one probe on this rank, beginning with all the others, and return its reading."""
    import torch
    import torch.distributed as dist

    from pytest_ckpt.save.probes import memory_probe

    def agree(count: int) -> int:
        least = torch.tensor([count])
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=rank.control_group)
        dist.barrier(group=rank.control_group)
        return int(least)

    with rank.status.phase(f"probe {name}"):
        if location is None:
            reading = memory_probe(name, rank.device, max_bytes=max_bytes, max_seconds=max_seconds, agree=agree)
        else:
            path = os.path.join(location, f"{name}.{rank.rank}")
            reading = write_probe(_MODES[name], path, max_bytes=max_bytes, max_seconds=max_seconds, agree=agree)
    return {**msgspec.to_builtins(reading), "host": rank.host}


def _measure(
    world: World,
    names: Sequence[str],
    progress: Progress,
    location: str | None,
    max_bytes: int,
    max_seconds: float,
) -> list[Probe]:
    probes = []
    for name in names:
        progress.step(f"probing {_LABELS[name]}", location, max_bytes)
        replies = world.run(
            probe_rank,
            while_waiting=progress.poll,
            name=name,
            location=location,
            max_bytes=max_bytes // world.size,
            max_seconds=max_seconds,
        )
        readings = msgspec.convert(replies, list[Reading])
        probes.append(combine(name, from_common_start(readings, [reply.get("host", 0) for reply in replies])))
    return probes


def from_common_start(readings: Sequence[Reading], hosts: Sequence[int]) -> list[Reading]:
    """Return readings of several hosts, whose clocks have no common axis, counted from when each host began.

    They begin on leaving one barrier, so within its latency of each other.
    """
    if not any(hosts):
        return list(readings)
    began = {host: min(r.start_s for r, of in zip(readings, hosts, strict=True) if of == host) for host in set(hosts)}
    return [
        msgspec.structs.replace(reading, start_s=reading.start_s - began[host], end_s=reading.end_s - began[host])
        for reading, host in zip(readings, hosts, strict=True)
    ]


def _affordable(location: str, max_bytes: int) -> int:
    """Return `max_bytes`, or less: a probe must not be what fills a target, or the memory behind a tmpfs."""
    space = os.statvfs(location)
    return max(LEAST_BYTES, min(max_bytes, space.f_bavail * space.f_frsize // 2, available_memory_bytes() // 4))
