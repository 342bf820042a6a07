"""What the ranks do while a promise is put to the test; each function is a command of `World.run`."""

from __future__ import annotations

import gc
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec

from pytest_ckpt.accept import states
from pytest_ckpt.accept.audit import audit
from pytest_ckpt.accept.faults import Fault, plant, unplant
from pytest_ckpt.accept.states import DictSpec
from pytest_ckpt.errors import SettingError
from pytest_ckpt.world import commands
from pytest_ckpt.world.context import Rank


def open_trial(rank: Rank, *, setup: dict[str, Any]) -> dict[str, Any]:
    """Make the engine that `setup` describes, and say whose the parts of its writer are.

    `setup` holds the keyword arguments of `commands.make_engine_of`. Of the reply, `methods` names for each method of
    the writer the module that defines it.
    """
    from pytest_ckpt.save.torch_private import clear_plan_caches

    commands.release(rank)
    clear_plan_caches()
    with rank.status.phase("make the engine"):
        rank.memory["engine"] = engine = commands.make_engine_of(rank, **setup)
    rank.memory["setup"] = setup
    made = getattr(engine, "_make_writer", None)
    writer = made(os.path.join(rank.scratch, "never-written")) if made is not None else None
    return {
        "pid": os.getpid(),
        "methods": {name: _defined_in(writer, name) for name in ("write_data", "finish", "stage")} if writer else {},
    }


def whose_reader(rank: Rank, *, setup: dict[str, Any], location: str) -> str | None:
    """Return the module that reads the data of the checkpoint at `location`; of another engine than DCP's, None."""
    from pytest_ckpt.save.dcp import DcpEngine

    engine = _opened(rank, setup)
    return _defined_in(engine.reader(location), "read_data") if isinstance(engine, DcpEngine) else None


def save(
    rank: Rank,
    *,
    setup: dict[str, Any],
    spec: dict[str, Any],
    step: int,
    location: str,
    fault: dict[str, Any] | None = None,
    then_step: int | None = None,
    caught: bool = False,
    audited: bool = False,
) -> dict[str, Any]:
    """Save the state of `spec` at `step` into `location`; return what it held and how long that took.

    A state of the same `spec` that this rank holds is changed in place, as training does. With `then_step`, it is
    changed to that step as soon as the save allows it, and then the file `fault["go"]` is made. `caught`: an error
    comes back as text. `audited`: an `Audit` of this rank's syncs comes back too.
    """
    engine = _opened(rank, setup)
    planned = msgspec.convert(spec, DictSpec)
    state = _state_at(rank, spec, planned, step)
    with rank.status.phase("compare the state"):
        reply = _content(state)
    engine.prepare(location)
    planted = None if fault is None else msgspec.convert(fault, Fault)
    rank.memory["location"] = location
    try:
        if planted is not None:
            plant(engine, planted, rank.rank)
        _barrier(rank)
        began = time.monotonic()
        with audit(location) if audited else nullcontext() as noted:
            _save(rank, engine, state, planned, then_step, planted)
            seconds = time.monotonic() - began
    except _errors() as error:
        if not caught:
            raise
        del rank.memory["location"]
        return {**reply, "error": _described(error, location)}
    finally:
        unplant(engine)
    del rank.memory["location"]
    return {**reply, "seconds": seconds, "audit": None if noted is None else msgspec.to_builtins(noted.result())}


def load(rank: Rank, *, setup: dict[str, Any], spec: dict[str, Any], location: str) -> dict[str, Any]:
    """Load `location` into a fresh state of `spec` that was wiped, and return what that holds then, and any error."""
    engine = _opened(rank, setup)
    rank.memory.pop("state", None)
    state = states.build(msgspec.convert(spec, DictSpec), rank.mesh, rank.device)
    states.wipe(state)
    try:
        with rank.status.phase("load"):
            engine.load(state, location)
    except SettingError:  # the user's to mend
        raise
    except _errors() as error:
        return {**_content(state), "error": _described(error)}
    return _content(state)


def start_and_never_look(
    rank: Rank, *, setup: dict[str, Any], spec: dict[str, Any], location: str, fault: dict[str, Any]
) -> None:
    """Begin an async save in which `fault` happens, wait for its end, and never read its future."""
    engine = _opened(rank, setup)
    state = _state_at(rank, spec, msgspec.convert(spec, DictSpec), 0)
    engine.prepare(location)
    plant(engine, msgspec.convert(fault, Fault), rank.rank)
    pending = engine.start(state)
    # A loop of its own: asking whether a future is done is not reading it.
    while not _done(pending.completed):
        time.sleep(0.01)


def train_beside_a_save(rank: Rank, *, setup: dict[str, Any], location: str, steps: int, shared: bool) -> int:
    """Reduce gradients while the engine saves, and return the steps; `shared`: DCP saves, on the group of training."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import state_dict_saver

    engine = _opened(rank, setup)
    state = {f"weight{rank.rank}": torch.ones(2**21, device=rank.device)}
    upload: Any
    if shared:
        upload = state_dict_saver.async_save(state, checkpoint_id=location)
    else:
        engine.prepare(location)
        upload = engine.start(state).completed
    gradient = torch.ones(1024, device=rank.device)
    for _ in range(steps):
        dist.all_reduce(gradient)
    if upload is not None:
        upload.result()
    return steps


def save_unequal_replicas(rank: Rank, *, setup: dict[str, Any], location: str) -> dict[str, Any]:
    """Save a plain tensor that has another value on each rank under one key."""
    import torch

    engine = _opened(rank, setup)
    state = {"replica": torch.full((4,), float(rank.rank), device=rank.device)}
    reply = _content(state)
    engine.prepare(location)
    try:
        _finish(engine.start(state))
    except _errors() as error:
        reply["error"] = _described(error, location)
    return reply


def optimizer_that_never_stepped(rank: Rank, *, setup: dict[str, Any], location: str) -> dict[str, Any]:
    """Save an optimizer that stepped, load it into one that never did; return how many entries each holds."""
    import torch

    engine = _opened(rank, setup)

    def made(stepped: bool) -> torch.optim.Optimizer:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2, device=rank.device)
        optimizer = torch.optim.AdamW(model.parameters())
        if stepped:
            model(torch.ones(1, 4, device=rank.device)).sum().backward()
            optimizer.step()
        return optimizer

    saved, fresh = made(True).state_dict(), made(False)
    engine.prepare(location)
    _finish(engine.start({"optimizer": saved}))
    loaded = {"optimizer": fresh.state_dict()}
    error = None
    try:
        engine.load(loaded, location)
        fresh.load_state_dict(loaded["optimizer"])
    except _errors() as raised:
        error = _described(raised, location)
    return {"saved": len(saved["state"]), "loaded": len(fresh.state_dict()["state"]), "error": error}


def step_with_and_without_a_load(rank: Rank, *, setup: dict[str, Any], location: str) -> dict[str, Any]:
    """Train two steps, save, train one more; load the save into a fresh model and train that one step again.

    Returns the digests of weights and moments after either.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    engine = _opened(rank, setup)
    model, optimizer = _small_training(rank)
    for number in range(2):
        _train(rank, model, optimizer, number)
    weights, moments = get_state_dict(model, optimizer)
    engine.prepare(location)
    _finish(engine.start({"model": weights, "optimizer": moments}))
    _train(rank, model, optimizer, 2)
    without = _training_content(model, optimizer)
    model, optimizer = _small_training(rank, seed=1)
    weights, moments = get_state_dict(model, optimizer)
    loaded: dict[str, Any] = {"model": weights, "optimizer": moments}
    engine.load(loaded, location)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    _train(rank, model, optimizer, 2)
    return {"without": without, "with": _training_content(model, optimizer)}


def memory_after_saves(rank: Rank, *, setup: dict[str, Any], folder: str, saves: int, state_bytes: int) -> list[int]:
    """Save a state of `state_bytes` on this rank again and again, and return the resident bytes after each save."""
    import psutil
    import torch

    engine = _opened(rank, setup)
    state = {f"weight{rank.rank}": torch.rand(state_bytes // 4, device=rank.device)}
    own, resident = psutil.Process(), []
    for number in range(saves):
        location = os.path.join(folder, str(number))
        engine.prepare(location)
        _finish(engine.start(state))
        gc.collect()
        resident.append(int(own.memory_info().rss))
        _barrier(rank)
        if rank.rank == 0:
            _forget(location)
    return resident


def _opened(rank: Rank, setup: dict[str, Any]) -> Any:
    if rank.memory.get("setup") != setup:
        open_trial(rank, setup=setup)
    return rank.memory["engine"]


def _state_at(rank: Rank, spec: dict[str, Any], planned: DictSpec, step: int) -> dict[str, Any]:
    held, state = rank.memory.get("held", (None, None))
    if held == spec:
        states.set_step(planned, state, rank.mesh, rank.device, step)
    else:
        state = states.build(planned, rank.mesh, rank.device, step)
        rank.memory["held"] = (spec, state)
    return state  # type: ignore[no-any-return]


def _save(
    rank: Rank, engine: Any, state: dict[str, Any], spec: DictSpec, then_step: int | None, fault: Fault | None
) -> None:
    from pytest_ckpt.save import watch

    pending = engine.start(state)
    if then_step is not None:
        if pending.staged is not None:
            pending.staged.result()
        states.set_step(spec, state, rank.mesh, rank.device, then_step)
        if fault is not None and fault.go:
            Path(fault.go).touch()
    _finish(pending)
    watch.require_saves_finished()


def _finish(pending: Any) -> None:
    for future in (pending.staged, pending.completed):
        if future is not None:
            future.result()


def _done(future: Any) -> bool:
    inner = getattr(future, "_future", future)
    return future is None or bool(inner.done())


def _content(state: dict[str, Any]) -> dict[str, Any]:
    from pytest_ckpt.save.digest import digest_parts

    return {"tensors": digest_parts(state), "objects": states.objects(state), "error": None}


def _errors() -> tuple[type[BaseException], ...]:
    """What a save or load raises: DCP's own is no `Exception`."""
    from torch.distributed.checkpoint.api import CheckpointException

    return (Exception, CheckpointException)


def _barrier(rank: Rank) -> None:
    import torch.distributed as dist

    with rank.status.phase("barrier"):
        dist.barrier(group=rank.control_group)


def _described(error: BaseException, location: str | None = None) -> dict[str, Any]:
    from pytest_ckpt.save import watch
    from pytest_ckpt.save.failures import describe

    watch.forget_saves()
    told = describe(error, location, 0)
    return {key: told[key] for key in ("cause", "origins", "hints")}


def _defined_in(writer: Any, name: str) -> str | None:
    return next((cls.__module__ for cls in type(writer).__mro__ if name in vars(cls)), None)


def _small_training(rank: Rank, seed: int = 0) -> tuple[Any, Any]:
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).to(rank.device)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=rank.mesh)
    fully_shard(model, mesh=rank.mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _train(rank: Rank, model: Any, optimizer: Any, number: int) -> None:
    import torch

    random = torch.Generator().manual_seed(1000 * number + rank.rank)
    loss = model(torch.rand(4, 8, generator=random).to(rank.device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _training_content(model: Any, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return _content({"model": weights, "optimizer": moments})


def _forget(location: str) -> None:
    import shutil

    shutil.rmtree(location)
