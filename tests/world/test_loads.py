"""Loads: what is measured, the order of steps, and that what was loaded is what was saved, on real gloo ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_ckpt.errors import LoadDiffers, TooSlow
from pytest_ckpt.records import Round
from pytest_ckpt.target.interface import WorkFolder
from pytest_ckpt.target.path import open_target
from pytest_ckpt.target.spec import TargetSpec
from pytest_ckpt.world import commands
from pytest_ckpt.world.functions import reference
from pytest_ckpt.world.interface import RankFailure
from pytest_ckpt.world.loads import measure_loads
from pytest_ckpt.world.rounds import Measured, RoundsPlan, Saving
from pytest_ckpt.world.spawned import SpawnedWorld

from . import loading
from .fakes import FakeFolder, FakeProgress, FakeWorld

NOTES = ("cold: page cache dropped", "cold: fadvise only (not root)", "cold: fadvise only (not permitted here)")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[WorkFolder]:
    folder = open_target(TargetSpec("disk", str(tmp_path), str(tmp_path), "a test")).open()
    yield folder
    folder.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def four() -> Iterator[SpawnedWorld]:
    world = SpawnedWorld(4, timeout_s=120)
    yield world
    world.close()


def saving(model: Callable[..., Any] | None = None, engine: Callable[..., Any] | None = None, **given: Any) -> Saving:
    return Saving(
        **{
            "mode": "sync",
            "writer": reference(loading.plain_writer, "writer"),
            "model": "llama3-tiny" if model is None else "own",
            "state": "fp32-adamw",
            "function": reference(model, "model") if model is not None else None,
            "engine": "dcp" if engine is None else "own",
            "engine_factory": reference(engine, "engine") if engine is not None else None,
            **given,
        }
    )


def measure(
    save_world: SpawnedWorld,
    load_world: SpawnedWorld,
    folder: WorkFolder,
    what: Saving | None = None,
    *,
    cold: bool = False,
    rounds: int = 2,
    **plan: Any,
) -> Measured:
    own = RoundsPlan(rounds=rounds, max_time_s=120, **plan)
    return measure_loads(save_world, load_world, folder, what or saving(), own, FakeProgress(), cold=cold)


def require_sound(taken: Round) -> None:
    assert taken.save_s == taken.stall_s == pytest.approx(max(rank.save_s for rank in taken.ranks))
    for rank in taken.ranks:
        assert sum(rank.phases.values()) == pytest.approx(taken.save_s)
        assert {"state_dict", "plan", "read"} <= set(rank.phases)
        assert not {"write", "sync", "serialize", "copy", "metadata"} & set(rank.phases)
    assert max(taken.phases, key=lambda name: taken.phases[name])


def test_loads_are_measured_and_nothing_is_left(world: SpawnedWorld, folder: WorkFolder) -> None:
    measured = measure(world, world, folder)
    assert len(measured.rounds) == 2
    for taken in [measured.first_save, *measured.rounds]:
        require_sound(taken)
    assert measured.logical_bytes == 11_017_728
    assert measured.stored_bytes is not None
    assert measured.logical_bytes < measured.stored_bytes < measured.folder_bytes
    assert measured.rounds[0].throughput_Bps == measured.logical_bytes / measured.rounds[0].save_s
    assert measured.notes == []
    assert [len(ranks) for ranks in measured.spans] == [2, 2]
    assert list(Path(folder.location).glob("*-load*")) == []


@pytest.mark.parametrize(
    ("model", "cold"),
    [
        pytest.param(None, True, id="llama3-tiny-cold"),
        pytest.param(None, False, id="llama3-tiny-warm", marks=pytest.mark.long),
        pytest.param(loading.of_all_kinds, True, id="own-cold", marks=pytest.mark.long),
        pytest.param(loading.of_all_kinds, False, id="own-warm", marks=pytest.mark.long),
    ],
)
def test_checkpoint_of_four_ranks_is_loaded_by_two(
    world: SpawnedWorld, four: SpawnedWorld, folder: WorkFolder, model: Any, cold: bool
) -> None:
    if model is not None:  # its keys differ from rank to rank, so that four of them are more than two have
        with pytest.raises(LoadDiffers, match=r"own2, own3 \(2 of 9 tensors differ\)"):
            measure(four, world, folder, saving(model), cold=cold)
        return
    measured = measure(four, world, folder, cold=cold)
    assert four.pids == [], "the state is not held twice"
    assert [len(taken.ranks) for taken in measured.rounds] == [2, 2]
    assert [note in NOTES for note in measured.notes] == [True] * cold


def test_state_of_all_kinds_is_wiped_and_loaded(world: SpawnedWorld, folder: WorkFolder) -> None:
    assert len(measure(world, world, folder, saving(loading.of_all_kinds)).rounds) == 2


def test_cold_load_is_read_from_storage_and_a_warm_one_is_not(world: SpawnedWorld, folder: WorkFolder) -> None:
    warm = measure(world, world, folder)
    cold = measure(world, world, folder, cold=True)
    read = [[sum(rank.read_bytes or 0 for rank in taken.ranks) for taken in m.rounds] for m in (warm, cold)]
    if not any(read[1]) and cold.rounds[0].ranks[0].read_bytes is None:
        pytest.skip("this kernel does not count what a process reads")
    assert max(read[0]) < 0.1 * warm.logical_bytes
    assert min(read[1]) > 0.9 * cold.logical_bytes
    assert len(cold.notes) == 1
    assert cold.notes[0].startswith("cold: ")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (loading.loses_one_element, rf"not what was saved: {loading.LOST} \(1 of 84 tensors differ\)"),
        (loading.loads_nothing, r"not what was saved: app\.\S+, app\.\S+, app\.\S+ and 81 more \(84 of 84"),
    ],
)
def test_load_that_loses_something_fails_and_names_it(
    world: SpawnedWorld, folder: WorkFolder, engine: Callable[..., Any], message: str
) -> None:
    with pytest.raises(LoadDiffers, match=message):
        measure(world, world, folder, saving(engine=engine))
    assert list(Path(folder.location).glob("*-load*")) == []
    assert len(measure(world, world, folder).rounds) == 2, "the ranks go on"


def test_checkpoint_that_dcp_cannot_find_is_refused_in_one_sentence(world: SpawnedWorld, folder: WorkFolder) -> None:
    with pytest.raises(RankFailure) as caught:
        measure(world, world, folder, saving(writer=reference(loading.own_format, "writer")))
    assert caught.value.is_usage
    assert caught.value.culprits[0].cause.startswith("the writer left no .metadata, so dcp.load(checkpoint_id=...)")


@pytest.mark.parametrize("keep", [{"keep_all": True}, {"keep_failed": True}], ids=str)
def test_checkpoint_is_kept_where_that_was_asked_for(
    world: SpawnedWorld, folder: WorkFolder, keep: dict[str, Any]
) -> None:
    measure(world, world, folder, rounds=1, **keep)
    assert len(list(Path(folder.location).glob("*-load*"))) == ("keep_all" in keep)
    with pytest.raises(LoadDiffers):
        measure(world, world, folder, saving(engine=loading.loads_nothing), **keep)
    assert len(list(Path(folder.location).glob("*-load*"))) == 1 + ("keep_all" in keep)


class _Loading(FakeWorld):
    """Ranks that answer at once what loads ask of them too."""

    def run(self, function: Callable[..., Any], /, **arguments: Any) -> list[Any]:
        if function is commands.digest_state:
            self.steps.append("digest")
            return [{"x": [[], 1]}] * self.size
        if function is commands.release:
            self.steps.append("release")
            return [None] * self.size
        if function is not commands.load_round:
            return super().run(function, **arguments)
        self.steps.append(("load", arguments["location"], arguments["cold"]))
        replies = super().run(commands.save_round, location=arguments["location"])
        self.steps.pop()
        return [{**reply, "not_dropped": "not root"} for reply in replies]


def test_steps_come_in_order_and_the_saving_world_ends_before_the_other_begins() -> None:
    steps: list[Any] = []
    save_world, load_world = _Loading(4, steps=steps), _Loading(2, steps=steps)
    folder = FakeFolder(steps)
    plan = RoundsPlan(rounds=4, max_time_s=900)
    measured = measure_loads(
        save_world, load_world, folder, saving(), plan, FakeProgress(), cold=True, clock=load_world.clock
    )
    place = "/fake/0-llama3-tiny-load"
    assert steps == [
        *("renew", "prepare", ("save", place), "digest", "close engine", "close"),
        "prepare",
        *[("load", place, True), "digest"] * 5,
        "close engine",
        ("remove", place),
    ]
    assert measured.notes == ["cold: fadvise only (not root)"]


def test_loads_that_do_not_fit_the_time_fail_with_the_figures() -> None:
    world = _Loading(save_s=30, overhead_s=10)
    folder = FakeFolder(world.steps)
    plan = RoundsPlan(rounds=5, max_time_s=160)
    with pytest.raises(TooSlow, match=r"the warm-up load took 30\.0 s .*4 rounds after it need 200 s"):
        measure_loads(world, world, folder, saving(), plan, FakeProgress(), cold=False, clock=world.clock)
    assert folder.removed == folder.made
