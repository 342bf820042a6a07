"""A scenario's rounds on a fake world: the order of steps, the time rules, what is kept and what is deleted."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pytest_ckpt.errors import TooSlow
from pytest_ckpt.target.interface import WorkFolder
from pytest_ckpt.world.functions import FunctionRef
from pytest_ckpt.world.interface import RankFailure, World
from pytest_ckpt.world.rounds import LEAST_ROUNDS, Measured, Progress, RoundsPlan, Saving, affordable_rounds
from pytest_ckpt.world.rounds import measure_rounds as run_rounds
from pytest_ckpt.world.spawned import SpawnedWorld
from tests.world.fakes import FakeFolder, FakeProgress, FakeWorld


class Scene:
    """One scenario on a fake world."""

    def __init__(self, mode: str = "sync", **world: float) -> None:
        self.world = FakeWorld(**world)  # type: ignore[arg-type]
        self.folder = FakeFolder(self.world.steps)
        self.progress = FakeProgress()
        self.mode = mode

    def measure(self, rounds: int = 4, max_time_s: float = 900, **plan: Any) -> Measured:
        return run_rounds(
            self.world,
            self.folder,
            Saving(
                mode=self.mode, writer=FunctionRef("writers", "one"), model="tiny", state="fp32-adamw", function=None
            ),
            RoundsPlan(rounds=rounds, max_time_s=max_time_s, **plan),
            self.progress,
            self.world.clock,
        )


def test_worlds_and_their_fake_fit_the_same_seam() -> None:
    worlds: list[World] = [FakeWorld(), SpawnedWorld(2)]
    folder: WorkFolder = FakeFolder([])
    progress: Progress = FakeProgress()
    assert [world.size for world in worlds] == [2, 2]
    assert {world.device for world in worlds} == {"cpu"}
    assert folder
    assert progress


def test_steps_come_in_order_and_every_save_goes_into_a_fresh_folder_that_is_deleted_before_the_next() -> None:
    scene = Scene()
    scene.measure(rounds=4)
    made = [f"/fake/{number}-tiny-sync" for number in range(5)]
    expected: list[object] = ["prepare"]
    for location in made:
        expected += [("save", location), ("remove", location)]
    assert scene.world.steps == [*expected, "close engine"]
    assert scene.progress.told == [
        "making the state",
        "warm-up save",
        "warm-up save: cleaning",
        *(f"round {n} of 4{what}" for n in range(1, 5) for what in ("", ": cleaning")),
    ]
    assert scene.progress.polls == 7
    assert scene.progress.finished == 1


def test_figures_are_those_of_the_ranks_and_the_warm_up_is_no_round() -> None:
    measured = Scene(save_s=2.0, overhead_s=7.0).measure(rounds=4)
    assert [round_.save_s for round_ in measured.rounds] == pytest.approx([2.0] * 4)
    assert [round_.stall_s for round_ in measured.rounds] == pytest.approx([2.0] * 4), "a sync save blocks"
    assert measured.first_save.save_s == pytest.approx(2.0)
    assert measured.rounds[0].straggler == 1
    assert measured.rounds[0].throughput_Bps == pytest.approx(500_000)
    assert (measured.logical_bytes, measured.stored_bytes, measured.folder_bytes) == (1_000_000, 1_000_500, 1_002_000)
    assert measured.notes == []


def test_async_save_stalls_until_its_call_returns() -> None:
    measured = Scene("async", save_s=2.0).measure(rounds=4)
    assert [round_.stall_s for round_ in measured.rounds] == pytest.approx([0.2] * 4)


def test_rounds_that_do_not_fit_the_time_are_left_out_and_noted() -> None:
    measured = Scene(save_s=9.5, overhead_s=0.5).measure(rounds=20, max_time_s=65)
    assert len(measured.rounds) == 5
    assert measured.notes == ["5 of 20 rounds: more do not fit the 65.0 s of --ckpt-max-time"]


def test_scenario_whose_least_rounds_do_not_fit_fails_with_the_figures_and_is_cleaned() -> None:
    scene = Scene(save_s=30, overhead_s=10)
    with pytest.raises(
        TooSlow, match=r"the warm-up save took 30\.0 s .*4 rounds after it need 200 s; allowed are 120 s"
    ):
        scene.measure(rounds=5, max_time_s=120)
    assert scene.world.saves == 1
    assert scene.folder.removed == scene.folder.made
    assert scene.progress.finished == 1


def test_single_save_is_its_own_round_however_slow() -> None:
    scene = Scene(save_s=5000)
    measured = scene.measure(rounds=5, single=True)
    assert scene.world.saves == 1
    assert measured.rounds == [measured.first_save]


def test_kept_rounds_are_not_deleted() -> None:
    scene = Scene()
    scene.measure(keep_all=True)
    assert scene.folder.removed == []


def test_round_that_failed_is_deleted_and_nothing_follows() -> None:
    scene = Scene()
    scene.world.fail_in_save = 3
    with pytest.raises(RankFailure, match="OSError: planted"):
        scene.measure()
    assert scene.world.saves == 3
    assert scene.folder.removed == scene.folder.made
    assert scene.progress.finished == 1


def test_interrupted_round_is_deleted() -> None:
    scene = Scene()
    scene.world.fail_in_save, scene.world.failure = 1, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        scene.measure()
    assert scene.folder.removed == scene.folder.made
    assert scene.progress.finished == 1


@pytest.mark.parametrize("plan", [{"keep_failed": True}, {"keep_all": True}])
def test_round_that_failed_is_kept_where_asked_for(plan: dict[str, bool]) -> None:
    scene = Scene()
    scene.world.fail_in_save = 3
    with pytest.raises(RankFailure):
        scene.measure(**plan)
    assert scene.folder.made[-1] not in scene.folder.removed
    assert (scene.folder.made[0] in scene.folder.removed) == ("keep_all" not in plan)


def test_failed_clean_up_does_not_hide_why_the_round_failed() -> None:
    scene = Scene()
    scene.world.fail_in_save = 1

    def refuse(location: str) -> None:
        raise OSError("cannot delete")

    scene.folder.remove = refuse  # type: ignore[method-assign]
    with pytest.raises(RankFailure, match="planted"):
        scene.measure()


seconds = st.floats(min_value=0, max_value=1e7)


@given(wanted=st.integers(1, 1000), round_s=seconds, max_time_s=seconds | st.just(math.inf))
def test_affordable_rounds_fit_the_time_and_are_never_fewer_than_can_be_judged(
    wanted: int, round_s: float, max_time_s: float
) -> None:
    least = min(wanted, LEAST_ROUNDS)
    try:
        count = affordable_rounds(wanted, round_s, max_time_s, round_s / 2)
    except TooSlow:
        assert (least + 1) * round_s > max_time_s * (1 - 1e-9)
        return
    assert least <= count <= wanted
    assert (count + 1) * round_s <= max_time_s * (1 + 1e-9)
    if count < wanted:
        assert (count + 2) * round_s >= max_time_s * (1 - 1e-9), "one more would have fitted"


@given(wanted=st.integers(1, 100), round_s=seconds, shorter=seconds, longer=seconds)
def test_more_time_never_gives_fewer_rounds(wanted: int, round_s: float, shorter: float, longer: float) -> None:
    assume(shorter <= longer)
    try:
        few = affordable_rounds(wanted, round_s, shorter, round_s)
    except TooSlow:
        return
    assert affordable_rounds(wanted, round_s, longer, round_s) >= few
