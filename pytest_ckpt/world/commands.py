"""What a rank does for a benchmark: make the state and the engine, save once or load once, let them go."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import msgspec

from pytest_ckpt.measure.memory import PeakMemory
from pytest_ckpt.measure.page_cache import drop_everything, drop_files
from pytest_ckpt.measure.resources import BlockDevices, ProcessUsage, storage_read_bytes
from pytest_ckpt.measure.spans import RankTrace
from pytest_ckpt.world.context import Rank
from pytest_ckpt.world.functions import FunctionRef, resolve

_BARRIERS = 9
"""Before each round where ranks are on several hosts, whose clocks are compared by them."""
STEPS_BEFORE, STEPS_AFTER = 3, 2
"""Of a training beside the save, in each round."""


def prepare(
    rank: Rank,
    *,
    model: str,
    state: str,
    function: list[Any] | None,
    mode: str = "sync",
    writer: list[Any] | None = None,
    reader: list[Any] | None = None,
    options: dict[str, Any] | None = None,
    engine: str = "dcp",
    engine_factory: list[Any] | None = None,
    train: str | None = None,
    mesh: str | None = None,
    share: str | None = None,
) -> dict[str, Any]:
    """Make the training state of `model`, unless this rank holds it already, and the engine that will save it.

    `function` is the reference of a user's own state function, or None for a named geometry; `writer`, `reader` and
    `engine_factory` are references too. `mesh` (`replicate=2,shard=4`) is a full shard where it is left out; with
    `share` (`2/64`) the ranks hold what the first of so many would.
    """
    from pytest_ckpt.save.torch_private import clear_plan_caches

    close_engine(rank)
    clear_plan_caches()
    key = [model, state, function, mesh, share]
    if rank.memory.get("state_key") != key:
        release(rank)
        with rank.status.phase("make the state"):
            rank.memory["state"] = _make_state(rank, model, state, function, mesh, share)
        rank.memory["state_key"] = key
    if mode == "sync":  # training stands still: there are no steps to take
        train = None
    if train is not None and rank.memory.get("train") != train:
        with rank.status.phase("make the training"):
            rank.memory["training"] = _make_training(rank, model, train)
        rank.memory["train"] = train
        rank.memory.pop("trained", None)  # its own first steps are the ones to warm up with
    if train is None:
        rank.memory.pop("training", None)
        rank.memory.pop("train", None)
    if writer is not None:
        with rank.status.phase("make the engine"):
            rank.memory["engine"] = make_engine_of(rank, mode, writer, options or {}, engine, engine_factory, reader)
    return {"logical_bytes": rank.memory["state"].logical_bytes}


def save_round(
    rank: Rank,
    *,
    location: str,
    trace: bool = True,
    devices: list[str] | None = None,
    earlier: str | None = None,
) -> dict[str, Any]:
    """Save the state once into the fresh `location` and return this rank's clock readings, trace and resources.

    `devices` are the numbers of the block devices below the target, whose counters rank 0 reads. With `earlier`,
    another fresh location, a save into that is under way when this one is called.

    Only the save itself lies between the readings: changing the state, making the writer and waiting for the other
    ranks come before.
    """
    from pytest_ckpt.model.share_state import ShareState
    from pytest_ckpt.save import watch
    from pytest_ckpt.save.engine import timed_save
    from pytest_ckpt.save.share import mark_partial
    from pytest_ckpt.save.tracing import watch_engine

    state, engine = rank.memory["state"], rank.memory["engine"]
    beside = _Beside(rank) if "training" in rank.memory else None
    with rank.status.phase("change the state"):
        state.advance()
    if beside is not None:
        beside.before()
    under_way = None if earlier is None else _begin(rank, earlier)
    with rank.status.phase("make the writer"):
        engine.prepare(location)
    rank.memory["location"] = location  # where a failure looks for what was written
    watched = watch_engine(engine, rank.scratch) if trace else None
    peak, usage, disks = PeakMemory(), ProcessUsage(), BlockDevices(devices or [] if rank.rank == 0 else [])
    peak.start()
    usage.start()
    with rank.status.phase("barrier"):
        exits = _meet(rank)
    with watched.running() if watched else nullcontext():
        timed = timed_save(engine, state.state_dict, beside.meanwhile if beside else None, under_way)
    disk, (cpu_s, write_bytes), peak_rss_bytes = disks.since(), usage.stop(), peak.stop()
    watch.require_saves_finished()
    del rank.memory["location"]
    if rank.rank == 0 and isinstance(state, ShareState):
        mark_partial(location, state.share)
    reply = {
        "train": beside.after() if beside else None,
        **timed._asdict(),
        "host": rank.host,
        "exits_s": exits,
        "peak_rss_bytes": peak_rss_bytes,
        "cpu_s": cpu_s,
        "write_bytes": write_bytes,
        "disk": None if disk is None else [disk.written_bytes, disk.busy_s],
        "stored_bytes": engine.stored_bytes() if rank.rank == 0 else None,
        "streams_seen": False,
        "trace": None,
    }
    return reply if watched is None else _with_trace(reply, watched.result(timed))


def _meet(rank: Rank) -> list[float]:
    """Wait for all ranks, and return this rank's readings of the clock as it left each barrier, the last one's too."""
    import torch.distributed as dist

    exits = []
    for _ in range(_BARRIERS if rank.hosts else 1):
        dist.barrier(group=rank.control_group)
        exits.append(time.monotonic())
    return exits


def digest_state(rank: Rank) -> dict[str, Any]:
    """Return this rank's part of the digest of every tensor of the state."""
    from pytest_ckpt.save.digest import digest_parts

    with rank.status.phase("compare the state"):
        return digest_parts(rank.memory["state"].state_dict)


def load_round(rank: Rank, *, location: str, cold: bool, trace: bool = True) -> dict[str, Any]:
    """Load the checkpoint at `location` into the state, which was wiped, and return what `save_round` returns.

    `cold` has the page cache forget the checkpoint first. Only the load itself lies between the readings. `not_dropped`
    is why the page cache of the whole host was not dropped, of a host's first rank; None where it was, and on others.
    """
    import torch.distributed as dist

    from pytest_ckpt.model import values
    from pytest_ckpt.save.loading import WatchedLoad, require_loadable, timed_load

    state, engine = rank.memory["state"].state_dict, rank.memory["engine"]
    require_loadable(engine, location)
    with rank.status.phase("wipe the state"):
        for _, tensor in values.tensors(state):
            values.wipe(tensor)
    not_dropped = None
    if cold:
        with rank.status.phase("make the page cache cold"):
            drop_files(location)
            dist.barrier(group=rank.control_group)  # what is written by now can be dropped
            not_dropped = drop_everything() if rank.leads_host else None
    watched = WatchedLoad(state) if trace else None
    peak, usage = PeakMemory(), ProcessUsage()
    peak.start()
    usage.start()
    with rank.status.phase("barrier"):
        exits = _meet(rank)
    read_before = storage_read_bytes()
    with watched.running() if watched else nullcontext(), rank.status.phase("load"):
        timed = timed_load(engine, watched.state_dict if watched else state, location)
    read = storage_read_bytes()
    (cpu_s, write_bytes), peak_rss_bytes = usage.stop(), peak.stop()
    return {
        **timed._asdict(),
        "host": rank.host,
        "exits_s": exits,
        "peak_rss_bytes": peak_rss_bytes,
        "cpu_s": cpu_s,
        "write_bytes": write_bytes,
        "read_bytes": None if read is None or read_before is None else read - read_before,
        "streams_seen": False,
        "trace": None if watched is None else msgspec.to_builtins(watched.result(timed)),
        "not_dropped": not_dropped,
    }


def close_engine(rank: Rank) -> None:
    """End what the engine of the last scenario keeps between its saves: threads, a process, staged memory."""
    engine = rank.memory.pop("engine", None)
    if engine is not None:
        with rank.status.phase("close the engine"):
            engine.close()
        gc.collect()


def release(rank: Rank) -> None:
    """Drop the training state and give its memory back."""
    close_engine(rank)
    rank.memory.clear()
    gc.collect()
    if rank.device.type == "cuda":
        import torch

        torch.cuda.empty_cache()


def _begin(rank: Rank, location: str) -> Any:
    """Begin a save into `location`, change the state as soon as that is allowed, and return the save."""
    state, engine = rank.memory["state"], rank.memory["engine"]
    with rank.status.phase("begin an earlier save"):
        engine.prepare(location)
        pending = engine.start(state.state_dict)
        if pending.staged is not None:
            pending.staged.result()
        state.advance()
    return pending


class _Beside:
    """Training around and beside one save: steps before it, while it runs, and after it."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._steps = rank.memory["training"]
        self._before_s = 0.0
        self._beside: Any = None

    def before(self) -> None:
        with self._rank.status.phase("train before the save"):
            warm_up = 0 if self._rank.memory.get("trained") else 2
            self._before_s = self._steps.run_before(STEPS_BEFORE, warm_up=warm_up)
            self._rank.memory["trained"] = True

    def meanwhile(self, pending: Any) -> Any:
        from pytest_ckpt.save.engine import Meanwhile

        with self._rank.status.phase("train beside the save"):
            self._beside = self._steps.run_while(pending)
        if self._beside.other_failed:
            pending.completed.result()
            raise RuntimeError("the save of another rank failed")
        return Meanwhile(self._beside.waited_for_staging_s, self._beside.completed_s)

    def after(self) -> dict[str, Any] | None:
        """Return what was lost; None of a save that training stood still for."""
        if self._beside is None:
            return None
        with self._rank.status.phase("train after the save"):
            after_s = self._steps.run_after(STEPS_AFTER)
        plain: dict[str, Any] = msgspec.to_builtins(self._steps.summary(self._before_s, self._beside, after_s))
        return plain


def _make_training(rank: Rank, model: str, train: str) -> Any:
    from pytest_ckpt.model.budget import parse_tokens
    from pytest_ckpt.model.geometry import find_geometry
    from pytest_ckpt.model.training import TrainingSteps

    geometry = find_geometry(model, "scenario")
    tokens = parse_tokens(train, "--ckpt-train")
    return TrainingSteps(rank.memory["state"], geometry, tokens, rank.device, rank.control_group)


def _with_trace(reply: dict[str, Any], noted: Any) -> dict[str, Any]:
    """Return the reply with what was noted, of the background process too: it is this rank's as well."""
    trace: RankTrace = noted.trace
    background = noted.background
    if background is not None:
        reply["cpu_s"] += background.cpu_s
        for name in ("write_bytes", "peak_rss_bytes"):
            own, more = reply[name], getattr(background, name)
            reply[name] = None if own is None or more is None else own + more
    return {**reply, "streams_seen": noted.streams_seen, "trace": msgspec.to_builtins(trace)}


def make_engine_of(
    rank: Rank,
    mode: str,
    writer: list[Any],
    options: dict[str, Any],
    engine: str,
    engine_factory: list[Any] | None,
    reader: list[Any] | None = None,
) -> Any:
    """Return the engine of a scenario on this rank; `writer`, `reader` and `engine_factory` are references."""
    from pytest_ckpt.save.engines import EngineSetup, make_engine
    from pytest_ckpt.save.options import owned_by
    from pytest_ckpt.save.writers import check_options, make_writer

    ref = FunctionRef(*writer)
    factory, of_writer = resolve(ref, "writer"), owned_by("writer", options)
    check_options(factory, str(ref), of_writer)
    own = resolve(FunctionRef(*engine_factory), "engine") if engine_factory is not None else None
    setup = EngineSetup(
        mode=mode,
        group=rank.save_group,
        device=rank.device,
        make_writer=lambda location: make_writer(factory, location, str(ref), of_writer),
        options=options,
        planner=_planner_of(rank),
        make_reader=None if reader is None else _reader_maker(FunctionRef(*reader)),
    )
    return make_engine(engine, setup, own)


def _reader_maker(ref: FunctionRef) -> Callable[[str], Any]:
    from pytest_ckpt.save.readers import make_reader

    factory = resolve(ref, "reader")
    return lambda location: make_reader(factory, location, str(ref))


def _planner_of(rank: Rank) -> Any:
    """Return the planner that the state of this rank needs; None: DCP's own."""
    from pytest_ckpt.model.share_state import ShareState
    from pytest_ckpt.save.engines import PlannerSetup
    from pytest_ckpt.save.share import SharePlanner

    state = rank.memory.get("state")
    if not isinstance(state, ShareState):
        return None
    return PlannerSetup(SharePlanner, {"wholes": state.wholes, "share": state.share, "rank": rank.rank})


def _make_state(
    rank: Rank, model: str, state: str, function: list[Any] | None, mesh: str | None, share: str | None
) -> Any:
    from pytest_ckpt.model.geometry import find_geometry
    from pytest_ckpt.model.recipe import find_recipe
    from pytest_ckpt.model.share import parse_share
    from pytest_ckpt.model.share_state import make_share
    from pytest_ckpt.model.state import make_state, user_state
    from pytest_ckpt.world.mesh import full_shard, parse_mesh

    shape = parse_mesh(mesh or "", "scenario") or full_shard(rank.size)
    shape.require_size(rank.size, "scenario")
    if function is not None:
        ref = FunctionRef(*function)
        return user_state(resolve(ref, "model"), str(ref), rank.mesh_of(shape), rank.device)
    geometry, recipe = find_geometry(model, "scenario"), find_recipe(state, "scenario")
    own = parse_share(share or "", "scenario")
    if own is not None:
        return make_share(geometry, recipe, own, rank.rank, rank.device)
    return make_state(geometry, recipe, rank.mesh_of(shape), rank.device)
