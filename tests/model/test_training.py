"""Training steps on ranks of a real gloo world, alone and beside a save."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from pytest_ckpt.errors import SettingError
from pytest_ckpt.measure.memory import PeakMemory
from pytest_ckpt.model import values
from pytest_ckpt.model.beside import training_beside
from pytest_ckpt.model.budget import TokensPerRank, training_bytes
from pytest_ckpt.model.forward import next_token_loss
from pytest_ckpt.model.geometry import GEOMETRIES, DeepSeekV3, Geometry, Llama3, Qwen3MoE
from pytest_ckpt.model.module import build_module
from pytest_ckpt.model.recipe import RECIPES
from pytest_ckpt.model.state import TrainingState, make_state
from pytest_ckpt.model.training import TrainingSteps
from pytest_ckpt.save.dcp import DcpEngine
from pytest_ckpt.world.context import Rank
from pytest_ckpt.world.spawned import SpawnedWorld

TINY = GEOMETRIES["llama3-tiny"]
SMALL = Llama3("small", 2, 32, 64, False, 4, 2, 8, 48)
# No dimension divides by 2.
UNEVEN = Llama3("uneven-tied", 2, 30, 101, True, 3, 1, 10, 70)
MOE = Qwen3MoE("uneven-moe", 2, 21, 37, False, 2, 1, 4, 6, 3, 2)
DEEPSEEK = DeepSeekV3("deepseek", 2, 24, 50, False, 3, 16, 8, 6, 4, 5, 1, 40, 12, 6, 2, 2)
BY_NAME = {g.name: g for g in (SMALL, UNEVEN, MOE, DEEPSEEK, *GEOMETRIES.values())}
TOKENS = TokensPerRank(2, 16)
LATE_S = 0.4


@pytest.fixture(scope="module")
def world() -> Iterator[SpawnedWorld]:
    world = SpawnedWorld(2, timeout_s=60)
    yield world
    world.close()


def made(
    rank: Rank, geometry: Geometry, recipe: str = "fp32-adamw", tokens: TokensPerRank = TOKENS
) -> tuple[TrainingState, TrainingSteps]:
    torch.set_num_threads(1)
    state = make_state(geometry, RECIPES[recipe], rank.mesh, rank.device)
    return state, TrainingSteps(state, geometry, tokens, rank.device, rank.control_group)


def copies(state: TrainingState) -> dict[str, torch.Tensor]:
    return {key: values.local(t).clone() for key, t in values.tensors(state.state_dict)}


# Steps


def compare_with_unsharded(rank: Rank, model: str) -> list[float]:
    """Return loss and unsharded loss, and the largest difference of gradients averaged over ranks."""
    geometry = BY_NAME[model]
    state, steps = made(rank, geometry)
    sharded = state.state_dict["app"].model
    whole = build_module(geometry, "cpu")
    with torch.no_grad():
        for mine, other in zip(sharded.parameters(), whole.parameters(), strict=True):
            other.copy_(mine.full_tensor())
    tokens, targets = steps._batches[0]
    loss = next_token_loss(whole(tokens), targets)
    torch.autograd.backward([loss])
    differences: list[float] = []

    def compare() -> None:
        for mine, other in zip(sharded.parameters(), whole.parameters(), strict=True):
            assert isinstance(mine.grad, DTensor)
            assert other.grad is not None
            dist.all_reduce(other.grad, group=rank.control_group)
            expected = other.grad / rank.size
            scale = expected.abs().max().item() + 1e-12
            differences.append((mine.grad.full_tensor() - expected).abs().max().item() / scale)

    return [steps.step(compare).item(), loss.item(), max(differences), len(differences)]


@pytest.mark.parametrize("geometry", [SMALL, UNEVEN, MOE, DEEPSEEK], ids=lambda g: g.name)
def test_sharded_loss_and_gradients_are_those_of_the_unsharded_model(world: SpawnedWorld, geometry: Geometry) -> None:
    replies = world.run(compare_with_unsharded, model=geometry.name)
    for loss, expected, difference, compared in replies:
        assert loss == pytest.approx(expected, rel=1e-5)
        assert difference < 1e-4
        assert compared == geometry.tensor_count
    assert replies[0][0] != replies[1][0], "each rank has tokens of its own"


def losses_on_the_same_batches(rank: Rank, recipe: str) -> list[float]:
    state, steps = made(rank, SMALL, recipe)
    app = state.state_dict["app"]
    with torch.no_grad():
        for weight in app.model.parameters():
            values.local(weight).normal_(std=0.1, generator=torch.Generator().manual_seed(rank.rank))
    steps._optimizer.state.clear()
    steps._learning_rate = 1e-2
    return [steps.step().item() for _ in range(40)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_learns_its_batches_in_every_recipe(world: SpawnedWorld, recipe: str) -> None:
    for losses in world.run(losses_on_the_same_batches, recipe=recipe):
        assert losses[0] > 3.5, "random tokens of 64"
        assert max(losses[-4:]) < 0.6 * losses[0]


def take_steps(rank: Rank, model: str, recipe: str, count: int) -> dict[str, Any]:
    state, steps = made(rank, BY_NAME[model], recipe)
    before, groups = copies(state), repr(_groups(state))
    losses = [steps.step().item() for _ in range(count)]
    after = copies(state)
    return {
        "losses": losses,
        "finite": all(t.isfinite().all().item() for t in after.values()),
        "largest": max(t.abs().max().item() for key, t in after.items() if ".model." in key and t.numel()),
        "same": [key for key, t in before.items() if t.ndim and t.numel() > 100 and torch.equal(t, after[key])],
        "same_keys": list(before) == list(after),
        "same_groups": groups == repr(_groups(state)),
        "gradients": sum(w.grad is not None for w in state.state_dict["app"].model.parameters()),
        "bytes": state.logical_bytes,
    }


def _groups(state: TrainingState) -> Any:
    return state.state_dict["app"].state_dict().get("optim", {}).get("param_groups")


@pytest.mark.parametrize("model", [TINY.name, MOE.name])
@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_change_all_that_is_saved_and_keep_it_finite(world: SpawnedWorld, model: str, recipe: str) -> None:
    """The state's values are random bits: neither weights nor moments are those of a training."""
    replies = world.run(take_steps, model=model, recipe=recipe, count=5)
    for reply in replies:
        assert reply["same"] == []
        assert reply["finite"]
        assert reply["largest"] < 10
        assert all(0 < loss < 100 for loss in reply["losses"])
        assert reply["same_keys"], "a state saved without an optimizer stays without"
        assert reply["same_groups"], "the learning rate that is saved is not the one of the steps"
        assert reply["gradients"] == 0
    assert replies == world.run(take_steps, model=model, recipe=recipe, count=5), "deterministic"


def refuse(rank: Rank) -> str:
    try:
        TrainingSteps(TrainingState({"weight": torch.ones(3)}), TINY, TOKENS, rank.device)
    except SettingError as error:
        return str(error)
    return ""


def test_users_own_state_is_refused_in_one_sentence(world: SpawnedWorld) -> None:
    expected = "no training beside the save: the state is the user's own, whose loss is not known"
    assert world.run(refuse) == [expected] * 2


def measure_memory(rank: Rank, model: str) -> int | None:
    made(rank, SMALL)[1].step()  # code and threads that a first step brings
    _, steps = made(rank, BY_NAME[model], tokens=TokensPerRank(1, 64))
    peak = PeakMemory()
    peak.start()
    steps.step()
    return peak.stop()


def test_memory_of_steps_is_about_what_the_budget_says() -> None:
    """In a world of its own: memory that earlier steps left to the allocator would hide what these take."""
    fresh = SpawnedWorld(2, timeout_s=60)
    try:
        peaks = fresh.run(measure_memory, model="llama3-debug")
    finally:
        fresh.close()
    if None in peaks:
        pytest.skip("this kernel does not let the peak be reset")
    expected = training_bytes(GEOMETRIES["llama3-debug"], RECIPES["fp32-adamw"], TokensPerRank(1, 64), ranks=2)
    assert 0.6 < sum(peaks) / expected < 1.4, f"{sum(peaks) / 1e6:.0f} MB seen, {expected / 1e6:.0f} MB expected"


# Beside a save


class PlantedSave(NamedTuple):
    staged: Any
    completed: Any


class Outcome(NamedTuple):
    """An end at a time, or with an error; `result()` as of a future."""

    future: Future[str]

    def result(self) -> str:
        return self.future.result()


def ends(after_s: float, error: str | None = None) -> Outcome:
    future: Future[str] = Future()
    end: Callable[[], None] = (
        (lambda: future.set_result("done")) if error is None else (lambda: future.set_exception(OSError(error)))
    )
    threading.Timer(after_s, end).start()
    return Outcome(future)


def train_beside(rank: Rank, staged: list[Any] | None, completed: list[Any]) -> dict[str, Any]:
    """`staged` and `completed`: for each rank after how many seconds, and the error if any."""
    _, steps = made(rank, SMALL)
    before = steps.run_before(3)
    start = time.monotonic()
    pending = PlantedSave(staged and ends(*staged[rank.rank]), ends(*completed[rank.rank]))
    try:
        beside = steps.run_while(pending)
    except OSError as error:
        return {"error": str(error), "after_s": time.monotonic() - start}
    if beside.other_failed:
        return {"other_failed": True, "after_s": time.monotonic() - start}
    after = steps.run_after(3)
    record = steps.summary(before, beside, after)
    return {
        **{name: getattr(record, name) for name in record.__struct_fields__},
        "spans": [list(span) for span in beside.spans],
        "completed_after_s": beside.completed_s - start,
        "other_failed": False,
    }


def test_steps_run_until_the_upload_is_complete_on_all_ranks_equally_many_on_each(world: SpawnedWorld) -> None:
    one, two = world.run(train_beside, staged=None, completed=[[0.05], [LATE_S]])
    assert one["step_s_during"] == two["step_s_during"], "the slowest rank's, agreed on"
    assert len(one["spans"]) == len(two["spans"]) == len(one["step_s_during"]) >= 2
    assert one["tokens_per_step"] == 2 * TOKENS.total
    assert one["tokens_per_s"] == pytest.approx(one["tokens_per_step"] / one["step_s_before"])
    assert one["mfu"] is None
    for reply in (one, two):
        spans = reply["spans"]
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert spans[-1][1] >= spans[0][0] + LATE_S - 0.1
        assert reply["waited_for_staging_s"] == 0
        assert not reply["other_failed"]
    assert 0.04 < one["completed_after_s"] < 0.3, "the rank's own end, not the last step's"
    assert two["completed_after_s"] >= LATE_S - 0.01


def test_upload_that_is_complete_at_once_still_gets_one_step(world: SpawnedWorld) -> None:
    for reply in world.run(train_beside, staged=None, completed=[[0.0], [0.0]]):
        assert len(reply["step_s_during"]) >= 1


def test_step_waits_for_staging_before_its_optimizer_and_the_wait_is_no_part_of_the_step(world: SpawnedWorld) -> None:
    one, two = world.run(train_beside, staged=[[0.0], [LATE_S]], completed=[[LATE_S], [LATE_S]])
    assert one["waited_for_staging_s"] == two["waited_for_staging_s"], "the longest of the ranks'"
    assert LATE_S / 2 < one["waited_for_staging_s"] <= LATE_S + 0.05
    first = two["spans"][0][1] - two["spans"][0][0]
    assert first >= one["waited_for_staging_s"]
    assert one["step_s_during"][0] <= first - one["waited_for_staging_s"] + 0.2


@pytest.mark.parametrize("where", ["staged", "completed"])
def test_rank_whose_save_fails_raises_its_cause_and_the_others_stop_with_it(world: SpawnedWorld, where: str) -> None:
    never = 2.0
    planted: dict[str, Any] = {"staged": [[0.0], [0.0]], "completed": [[never], [never]]}
    planted[where][1] = [0.1, "planted"]
    one, two = world.run(train_beside, **planted)
    assert two["error"] == "planted"
    assert one["other_failed"]
    assert one["after_s"] < never - 0.5, "not held by the failed rank, nor by its own upload"
    assert two["after_s"] < never - 0.5


class SlowWriter(FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        time.sleep(LATE_S)
        written: torch.futures.Future[list[WriteResult]] = super().write_data(plan, planner)
        return written


def train_beside_a_real_save(rank: Rank, mode: str, location: str) -> dict[str, Any]:
    threads = set(threading.enumerate())  # those of planted saves that have not ended yet
    state, steps = made(rank, TINY)
    engine = DcpEngine(mode, SlowWriter, rank.save_group)
    try:
        engine.prepare(location)
        before = steps.run_before(2)
        saved = copies(state)
        pending = engine.start(state.state_dict)
        beside = steps.run_while(pending)
        assert pending.completed is not None
        pending.completed.result()
        trained = copies(state)
        engine.load(state.state_dict, location)
        loaded = copies(state)
    finally:
        engine.close()
    return {
        "steps": len(beside.steps_s),
        "lost_s": steps.summary(before, beside, before).lost_s,
        "trained": sum(not torch.equal(t, trained[key]) for key, t in saved.items()),
        "wrong": [key for key, t in saved.items() if not torch.equal(t, loaded[key])],
        "threads": [t.name for t in set(threading.enumerate()) - threads if t.name == "ckpt-upload"],
    }


@pytest.mark.parametrize("mode", ["async", "async-staged"])
def test_what_is_saved_beside_training_is_the_state_before_its_steps_bit_for_bit(
    world: SpawnedWorld, tmp_path: Path, mode: str
) -> None:
    one, two = world.run(train_beside_a_real_save, mode=mode, location=str(tmp_path / "save"))
    assert one["steps"] == two["steps"] >= 2
    for reply in (one, two):
        assert reply["trained"] > 0
        assert reply["wrong"] == []
        assert reply["threads"] == []


# The record


def test_lost_seconds_are_the_share_of_the_rate_that_is_missing_while_the_save_runs() -> None:
    record = training_beside(
        tokens_per_step=1000,
        before_s=0.5,
        during_s=[0.5, 1.0, 2.0],
        after_s=0.5,
        waited_for_staging_s=0.25,
        flops_per_token=10**9,
        peak_flops=8e12,
    )
    rate = 1000 / 0.5
    assert record.lost_s == pytest.approx(sum((1 - (1000 / dt) / rate) * dt for dt in (0.5, 1.0, 2.0))) == 2.0
    assert (record.slowdown, record.tokens_per_s, record.mfu) == (2.0, 2000.0, 0.25)
    faster = training_beside(
        tokens_per_step=1000, before_s=0.5, during_s=[0.4, 0.55], after_s=0.5, waited_for_staging_s=0.0
    )
    assert faster.lost_s == 0, "clipped as a sum, so that noise of single steps cancels"
    assert faster.mfu is None
