"""What a rank does for a benchmark: make the state, save it once, let it go."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import msgspec

from pytest_ckpt.measure.memory import PeakMemory
from pytest_ckpt.measure.resources import BlockDevices, ProcessUsage
from pytest_ckpt.world.context import Rank
from pytest_ckpt.world.functions import FunctionRef, resolve


def prepare(rank: Rank, *, model: str, state: str, function: list[Any] | None) -> dict[str, Any]:
    """Make the training state of `model`, unless this rank holds it already; forget DCP's cached plans.

    `function` is the reference of a user's own state function, or None for a named geometry.
    """
    from pytest_ckpt.save.torch_private import clear_plan_caches

    clear_plan_caches()
    key = [model, state, function]
    if rank.memory.get("state_key") != key:
        release(rank)
        with rank.status.phase("make the state"):
            rank.memory["state"] = _make_state(rank, model, state, function)
        rank.memory["state_key"] = key
    return {"logical_bytes": rank.memory["state"].logical_bytes}


def save_round(
    rank: Rank, *, mode: str, writer: list[Any], location: str, trace: bool = True, devices: list[str] | None = None
) -> dict[str, Any]:
    """Save the state once into the fresh `location` and return this rank's clock readings, trace and resources.

    `devices` are the numbers of the block devices below the target, whose counters rank 0 reads.

    Only the save itself lies between the readings: changing the state, making the writer and waiting for the other
    ranks come before.
    """
    import torch.distributed as dist

    from pytest_ckpt.save import dcp, watch
    from pytest_ckpt.save.trace import SaveTrace
    from pytest_ckpt.save.writers import make_writer

    state = rank.memory["state"]
    with rank.status.phase("change the state"):
        state.advance()
    with rank.status.phase("make the writer"):
        ref = FunctionRef(*writer)
        made = make_writer(resolve(ref, "writer"), location, str(ref))
    rank.memory["location"] = location  # where a failure looks for what was written
    tracer = SaveTrace() if trace else None
    streams_seen = tracer is not None and tracer.watch_writer(made)
    peak, usage, disks = PeakMemory(), ProcessUsage(), BlockDevices(devices or [] if rank.rank == 0 else [])
    peak.start()
    usage.start()
    with rank.status.phase("barrier"):
        dist.barrier(group=rank.control_group)
    with tracer.running() if tracer else nullcontext():
        timed = dcp.save(mode, state.state_dict, made, rank.save_group, tracer.planner() if tracer else None)
    disk, (cpu_s, write_bytes), peak_rss_bytes = disks.since(), usage.stop(), peak.stop()
    watch.require_saves_finished()
    del rank.memory["location"]
    return {
        "called_s": timed.called_s,
        "returned_s": timed.returned_s,
        "completed_s": timed.completed_s,
        "peak_rss_bytes": peak_rss_bytes,
        "cpu_s": cpu_s,
        "write_bytes": write_bytes,
        "disk": None if disk is None else [disk.written_bytes, disk.busy_s],
        "stored_bytes": dcp.stored_bytes(timed.metadata) if rank.rank == 0 else None,
        "streams_seen": streams_seen,
        "trace": None
        if tracer is None
        else msgspec.to_builtins(tracer.result(timed.called_s, timed.returned_s, timed.completed_s)),
    }


def release(rank: Rank) -> None:
    """Drop the training state and give its memory back."""
    rank.memory.clear()
    gc.collect()
    if rank.device.type == "cuda":
        import torch

        torch.cuda.empty_cache()


def _make_state(rank: Rank, model: str, state: str, function: list[Any] | None) -> Any:
    from pytest_ckpt.model.geometry import find_geometry
    from pytest_ckpt.model.recipe import find_recipe
    from pytest_ckpt.model.state import make_state, user_state

    if function is not None:
        ref = FunctionRef(*function)
        return user_state(resolve(ref, "model"), str(ref), rank.mesh, rank.device)
    return make_state(find_geometry(model, "scenario"), find_recipe(state, "scenario"), rank.mesh, rank.device)
