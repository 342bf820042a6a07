"""Each promise of suites/acceptance is broken by a planted defect: a promise that none can break is no test."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pytest_ckpt.accept.known import KNOWN
from pytest_ckpt.accept.power_cut import why_no_power_cut
from pytest_ckpt.accept.trial import DEFAULT_GRACE_S, CannotSave, Trial
from pytest_ckpt.errors import CkptError
from pytest_ckpt.model.recipe import find_recipe
from pytest_ckpt.plugin.specs import ModelSpec
from pytest_ckpt.records import Verification
from pytest_ckpt.save.writers import file_system_writer
from pytest_ckpt.target.workfolder import PathWorkFolder, make_work_folder
from pytest_ckpt.world.functions import reference
from pytest_ckpt.world.interface import RankFailure
from pytest_ckpt.world.rounds import Saving
from pytest_ckpt.world.spawned import SpawnedWorld
from suites.acceptance import (
    test_crashes as crashes,
)
from suites.acceptance import (
    test_durability as durability,
)
from suites.acceptance import (
    test_faults as faults,
)
from suites.acceptance import (
    test_integrity as integrity,
)
from suites.acceptance import (
    test_isolation as isolation,
)
from suites.acceptance import (
    test_round_trip as round_trip,
)

from . import defects, durable_saves

pytestmark = pytest.mark.timeout(120)
SUITE = (round_trip, isolation, integrity, durability, faults, crashes)
SHORTEST_GRACE_S = 0.5
DEADLINE_S = 20.0
"""Of each command; only a defect that hangs comes near."""
TRIES = 10
"""What DCP does with several threads depends on which of them meets the error."""
SHORT_S = 4.0
"""Where the defect is a wait without an end."""
Factory = Callable[..., Any]


@dataclass(frozen=True)
class Planted:
    """A promise, what is to break it, and what is then told."""

    promise: Callable[..., None]
    defect: Factory
    """Of a writer, or where it takes an `EngineSetup`, of an engine."""
    says: str
    """A regular expression: it is caught for what is wrong with it, and not for something else."""
    mode: str = "sync"
    given: dict[str, Any] = field(default_factory=dict)
    """Arguments that the suite's own parametrization gives."""
    known: str = ""
    """The defect is DCP's own, and this its name."""
    options: dict[str, Any] = field(default_factory=dict)
    is_impatient: bool = False
    """The defect is a wait without an end, and the deadline need not be long."""
    leaves_a_thread: bool = False
    """What it began goes on in the ranks, where the next test must not meet it."""
    long: bool = False

    def __str__(self) -> str:
        extra = ",".join(str(value) for value in (*self.given.values(), *self.options.values()))
        name = self.promise.__name__.removeprefix("test_")
        return "-".join(filter(None, (name, getattr(self.defect, "__name__", ""), self.mode, extra)))


DCP = file_system_writer
DIFFERS = "what was loaded is not what was saved: .*"
NO_ERROR = "DID NOT RAISE"
GONE = "global metadata read failed: .*No such file|in the load: AssertionError: no message"  # torch 2.13, and 2.9

COMES_BACK = round_trip.test_state_of_every_kind_comes_back_bit_for_bit
ANY_STATE = round_trip.test_any_state_comes_back_bit_for_bit
OTHER_RANKS = round_trip.test_another_number_of_ranks_loads_the_same
GOES_ON = round_trip.test_training_goes_on_after_a_load_as_without_one
NEVER_STEPPED = round_trip.test_an_optimizer_that_never_stepped_gets_all_of_its_state
REPLICAS = round_trip.test_ranks_that_disagree_on_a_replica_are_told
ONE_STEP = isolation.test_a_checkpoint_is_of_one_step_while_training_goes_on
OWN_STEP = isolation.test_each_checkpoint_is_of_its_own_step
TOO_EARLY = isolation.test_a_load_before_the_save_is_done_fails
MEMORY = isolation.test_saves_leave_no_memory_behind
COMPLETE = integrity.test_a_save_that_reported_success_is_complete_on_its_storage
DAMAGE = integrity.test_damage_to_a_file_is_told
FLIPPED = integrity.test_a_load_tells_a_flipped_byte
OVERWRITE = integrity.test_a_failed_overwrite_is_the_old_checkpoint_or_none
FEWER_RANKS = integrity.test_a_save_by_fewer_ranks_leaves_no_files_of_the_others
SYNCED = durability.test_what_a_save_reported_as_done_is_synced
POWER_CUT = durability.test_a_power_cut_after_a_save_takes_nothing
FULL = faults.test_a_full_target_is_told_with_rank_and_reason
FAILS = faults.test_a_rank_that_fails_fails_the_save_on_all_ranks
STUCK = faults.test_a_stuck_rank_is_named_at_the_deadline
SHARED_GROUP = faults.test_a_save_on_the_group_of_training_ends_in_bounded_time_with_that_reason
UNREAD = faults.test_a_failed_async_save_is_told_although_nobody_read_its_future
TERMINATED = crashes.test_a_rank_terminated_while_it_stages_leaves_the_last_checkpoint
KILLED = crashes.test_a_rank_killed_while_it_writes_leaves_the_last_checkpoint
ALL_KILLED = crashes.test_all_ranks_killed_before_the_metadata_leave_the_last_checkpoint
GRACE = crashes.test_a_save_of_the_model_is_complete_within_the_grace_period

PLANTED = (
    # What was saved comes back
    Planted(COMES_BACK, defects.ZeroesBfloat16, DIFFERS + "bfloat16"),
    Planted(COMES_BACK, defects.NarrowsFloat64, DIFFERS + "sharded float64"),
    Planted(COMES_BACK, defects.WritesMemoryOrder, DIFFERS + "strided"),
    Planted(COMES_BACK, defects.LosesObjects, DIFFERS + "None instead of"),
    Planted(COMES_BACK, defects.SwapsTwins, DIFFERS),
    Planted(COMES_BACK, defects.OnlyRankZero, "KeyError: MetadataIndex"),
    Planted(COMES_BACK, defects.DropsTheLastItem, "EOFError"),
    Planted(ANY_STATE, defects.LosesObjects, r"weight \(None instead of"),
    Planted(ANY_STATE, defects.ZeroesCubes, DIFFERS + "weight", long=True),
    Planted(OTHER_RANKS, defects.EachRankItsOwnFile, "The size of tensor a"),
    Planted(GOES_ON, defects.LosesMoments, "exp_avg"),
    Planted(GOES_ON, defects.LosesTheCount, "weight.step"),
    Planted(NEVER_STEPPED, DCP, "0 of 2 entries", known="optimizer-not-initialised"),
    Planted(REPLICAS, DCP, "2 values of one key", known="replicas-reduced"),
    # It is of one step, its own, and leaves nothing behind
    Planted(ONE_STEP, defects.copies_nothing, DIFFERS + "weights", mode="async"),
    Planted(OWN_STEP, defects.copies_the_first_alone, DIFFERS + "weights", mode="async"),
    Planted(OWN_STEP, defects.SavesTheFirstAgain, DIFFERS + "weights"),
    Planted(OWN_STEP, defects.SwapsTwins, DIFFERS + "weights"),
    Planted(TOO_EARLY, defects.LoadsInSilence, NO_ERROR),
    Planted(MEMORY, defects.keeps_each_copy, "each save leaves 4", mode="async"),
    Planted(MEMORY, defects.KeepsWhatItSaved, "each save leaves 4", long=True),
    # It is complete, and damage is told
    Planted(COMPLETE, defects.ForgetsAChunk, r"damaged \(hole\)"),
    Planted(COMPLETE, defects.LeavesAStrayFile, "nothing refers to __9_0.distcp"),
    Planted(COMPLETE, defects.SaysLongerThanWritten, r"damaged \(truncated\)"),
    Planted(COMPLETE, defects.DamagesWhatItWrote, r"damaged \(corrupt\)"),
    Planted(COMPLETE, defects.DropsTheLastItem, r"damaged \(truncated\)"),
    Planted(DAMAGE, defects.LoadsInSilence, NO_ERROR, given={"damage": "truncated"}),
    Planted(DAMAGE, defects.LoadsInSilence, NO_ERROR, given={"damage": "removed"}),
    Planted(DAMAGE, defects.LoadsInSilence, NO_ERROR, given={"damage": "emptied"}),
    Planted(FLIPPED, DCP, "one wrong byte", known="crc-not-checked"),
    Planted(OVERWRITE, DCP, "entries were loaded from the save that failed", known="overwrite-mixes"),
    Planted(OVERWRITE, defects.WritesOverInPlace, "entries were loaded from the save that failed"),
    Planted(FEWER_RANKS, DCP, "1 files", known="orphans-left"),
    Planted(FEWER_RANKS, defects.SkipsWhatIsThere, "failed reading zip archive|" + DIFFERS),
    # It is on the storage
    Planted(SYNCED, durable_saves.SyncsBeforeFlushing, "of .metadata were synced"),
    Planted(SYNCED, durable_saves.ForgetsTheRename, "the rename of .metadata was not synced, nor the folder"),
    Planted(SYNCED, durable_saves.ForgetsTheData, "__0_0.distcp, __1_0.distcp"),
    Planted(SYNCED, DCP, "not durable", known="not-durable"),
    Planted(POWER_CUT, durable_saves.ForgetsTheRename, f"after the cut: .*({GONE})"),
    Planted(POWER_CUT, DCP, f"after the cut: .*({GONE})", known="not-durable"),
    # What fails says so
    Planted(FULL, defects.SwallowsErrors, NO_ERROR),
    Planted(FULL, defects.HidesTheReason, "assert 'target full or write failed' in"),
    Planted(FAILS, defects.SwallowsErrors, "reported success"),
    Planted(FAILS, defects.SavesInSilence, "reported success"),
    Planted(FAILS, defects.RemembersAFailure, "KeyError: MetadataIndex"),
    Planted(FAILS, DCP, "reported success", known="thread-errors-lost", options={"thread_count": 4}),
    Planted(UNREAD, defects.SwallowsErrors, NO_ERROR, mode="async"),
    Planted(UNREAD, DCP, "only its future tells", mode="async", known="unread-future"),
    Planted(FAILS, defects.HangsOnAnError, "rank 1 is stuck", is_impatient=True),
    Planted(STUCK, defects.GivesUpWaiting, NO_ERROR, leaves_a_thread=True),
    Planted(STUCK, defects.IsDoneTooEarly, "'raised' == 'stuck'", mode="async", long=True),
    Planted(SHARED_GROUP, defects.SavesOnTheGroupOfTraining, "async save on training's group", mode="async"),
    # A crash takes nothing that was there
    Planted(TERMINATED, defects.DeletesTheLastFirst, GONE, mode="async"),
    Planted(KILLED, defects.DeletesTheLastFirst, GONE, long=True),
    Planted(KILLED, defects.SkipsWhatIsThere, "EOFError|zip archive|" + DIFFERS),
    Planted(ALL_KILLED, defects.ListsBeforeItWrites, NO_ERROR),
    Planted(GRACE, defects.Slow, "--ckpt-grace leaves 0.5 s"),
    Planted(GRACE, defects.ZeroesEverything, DIFFERS),
)
"""The last ones end ranks, and come last for that."""

HELD = (
    *(Planted(promise, DCP, "") for promise in (COMES_BACK, ANY_STATE, GOES_ON, OWN_STEP, TOO_EARLY)),
    Planted(OTHER_RANKS, DCP, "", long=True),
    *(Planted(promise, DCP, "", mode="async") for promise in (ONE_STEP, OWN_STEP, MEMORY, COMPLETE, FULL, FAILS)),
    *(Planted(DAMAGE, DCP, "", given={"damage": kind}) for kind in integrity.DAMAGES),
    Planted(NEVER_STEPPED, defects.VerifiesBeforeItLoads, ""),
    Planted(FLIPPED, defects.VerifiesBeforeItLoads, ""),
    Planted(OVERWRITE, defects.VerifiesBeforeItLoads, ""),
    Planted(REPLICAS, defects.RefusesUnequalReplicas, ""),
    Planted(SYNCED, durable_saves.Careful, ""),
    Planted(POWER_CUT, durable_saves.Careful, ""),
    Planted(GRACE, DCP, ""),
)
"""By the same way, with what has no such defect: what ends no ranks."""


class Worlds:
    """Worlds of any size, each made when it is first asked for."""

    def __init__(self) -> None:
        self._by_size: dict[int, SpawnedWorld] = {}

    def of(self, size: int) -> SpawnedWorld:
        return self._by_size.setdefault(size, SpawnedWorld(size, timeout_s=DEADLINE_S))

    def close(self) -> None:
        for world in self._by_size.values():
            world.close()


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    worlds = Worlds()
    yield worlds
    worlds.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PathWorkFolder]:
    folder = make_work_folder(str(tmp_path_factory.mktemp("disk")))
    yield folder
    folder.close()


@pytest.fixture
def trial_of(worlds: Worlds, folder: PathWorkFolder) -> Iterator[Callable[..., Trial]]:
    """Return what makes the trial of a writer or engine; what it saves is deleted after the test."""
    made: list[Trial] = []

    def make(
        saver: Factory, mode: str = "sync", kind: type[Trial] = Trial, reader: Factory | None = None, **options: Any
    ) -> Trial:
        is_engine = "setup" in inspect.signature(saver).parameters
        saving = Saving(
            mode=mode,
            writer=reference(DCP if is_engine else saver, "writer"),
            reader=None if reader is None else reference(reader, "reader"),
            model="",
            state="",
            function=None,
            options=options,
            engine="own" if is_engine else "dcp",
            engine_factory=reference(saver, "engine") if is_engine else None,
        )
        grace_s = SHORTEST_GRACE_S if saver is defects.Slow else DEFAULT_GRACE_S
        made.append(kind(worlds.of(2), folder, saving, world_beside=worlds.of, grace_s=grace_s))
        return made[-1]

    yield make
    for trial in made:
        trial.close()


def put_to_the_test(promise: Callable[..., None], trial: Trial, tmp_path: Path, **given: Any) -> None:
    """Call a test of the suite with what its fixtures would give it."""
    if promise is POWER_CUT and (why := why_no_power_cut()):
        pytest.skip(why)
    fixtures = {
        "ckpt_acceptance": trial,
        "ckpt_world": trial.world,
        "ckpt_model": ModelSpec("llama3-tiny", find_recipe("fp32-adamw", "test")),
        "tmp_path": tmp_path,
        **given,
    }
    promise(**{name: fixtures[name] for name in inspect.signature(promise).parameters})


def promises(module: ModuleType) -> set[Callable[..., None]]:
    return {test for name, test in vars(module).items() if name.startswith("test_") and inspect.isfunction(test)}


def cases(planted: Sequence[Planted]) -> list[Any]:
    return [pytest.param(one, id=str(one), marks=[pytest.mark.long] if one.long else []) for one in planted]


@pytest.mark.parametrize("planted", cases(PLANTED))
def test_defect_is_caught_by_the_promise_that_it_breaks(
    planted: Planted, trial_of: Callable[..., Trial], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = trial_of(planted.defect, planted.mode, **planted.options)
    trial.opened()  # what ranks import at first is not what is waited for
    monkeypatch.setattr(faults, "BOUNDED_S", SHORT_S)
    if planted.is_impatient:
        monkeypatch.setattr(trial.world, "timeout_s", SHORT_S)
    if planted.known:
        for _ in range(TRIES):
            put_to_the_test(planted.promise, trial, tmp_path, **planted.given)
            if trial.met:
                break
        assert list(trial.met) == [planted.known]
        told = trial.met[planted.known]
    else:
        with pytest.raises((AssertionError, CkptError, pytest.fail.Exception)) as raised:
            put_to_the_test(planted.promise, trial, tmp_path, **planted.given)
        told = str(raised.value)
    if planted.leaves_a_thread:
        trial.world.close()
    assert re.search(planted.says, told), told


class NeverLooksAgain(Trial):
    """What was verified once is taken for complete ever after."""

    def verify(self, location: str) -> Verification:
        return vars(self).setdefault("first", super().verify(location))  # type: ignore[no-any-return]


@pytest.mark.parametrize("damage", integrity.DAMAGES)
def test_damage_that_the_verifier_does_not_see_breaks_the_promise(
    damage: str, trial_of: Callable[..., Trial], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="complete: 9 entries"):
        put_to_the_test(DAMAGE, trial_of(DCP, kind=NeverLooksAgain), tmp_path, damage=damage)


@pytest.mark.parametrize(
    ("reader", "promise", "given"),
    [
        (defects.reads_nothing, integrity.test_damage_to_a_file_is_told, {"damage": "truncated"}),
        (defects.reads_nothing, integrity.test_a_load_tells_a_flipped_byte, {}),
        (defects.never_reads, integrity.test_damage_to_a_file_is_told, {"damage": "truncated"}),
        (defects.never_reads, integrity.test_a_load_tells_a_flipped_byte, {}),
        (defects.never_reads, isolation.test_a_load_before_the_save_is_done_fails, {}),
    ],
)
def test_reader_that_loads_nothing_does_not_pass_for_one_that_tells_damage(
    reader: Factory,
    promise: Callable[..., None],
    given: dict[str, Any],
    trial_of: Callable[..., Trial],
    tmp_path: Path,
) -> None:
    trial = trial_of(DCP, reader=reader)
    with pytest.raises((AssertionError, CannotSave, pytest.fail.Exception)):
        put_to_the_test(promise, trial, tmp_path, **given)
    assert trial.met == {}, "DCP is not to blame"


def test_reader_of_ones_own_that_takes_a_flipped_byte_is_not_dcps(
    trial_of: Callable[..., Trial], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="by a reader that is not DCP's"):
        put_to_the_test(
            integrity.test_a_load_tells_a_flipped_byte, trial_of(DCP, reader=defects.reads_as_dcp), tmp_path
        )


def test_what_is_no_reader_is_the_users_to_mend(trial_of: Callable[..., Trial]) -> None:
    trial = trial_of(DCP, reader=defects.no_reader)
    saved = trial.save(integrity.STATE)
    with pytest.raises(RankFailure, match=r"reader .*no_reader returned 'str'; it must return a") as raised:
        trial.require_equal(saved)
    assert raised.value.is_usage


@pytest.mark.parametrize("held", cases(HELD))
def test_promise_is_held_where_nothing_is_wrong(held: Planted, trial_of: Callable[..., Trial], tmp_path: Path) -> None:
    trial = trial_of(held.defect, held.mode)
    put_to_the_test(held.promise, trial, tmp_path, **held.given)
    assert trial.met == {}


def test_each_promise_has_a_defect_that_breaks_it() -> None:
    modules = {path.stem for path in Path(faults.__file__).parent.glob("test_*.py")}
    assert modules == {module.__name__.rpartition(".")[2] for module in SUITE}, "a module that is not looked at here"
    held_by = {planted.promise for planted in PLANTED}
    assert {promise for module in SUITE for promise in promises(module)} == held_by


def test_each_known_behaviour_of_dcp_is_seen_here() -> None:
    assert {planted.known for planted in PLANTED if planted.known} == set(KNOWN)
