"""What fails says so: within a bounded time, with the rank and the reason, on all ranks."""

from __future__ import annotations

import time

import pytest

from pytest_ckpt.accept import in_rank
from pytest_ckpt.accept.faults import FILE_LIMIT_BYTES, Fault
from pytest_ckpt.accept.states import DictSpec, TensorSpec
from pytest_ckpt.accept.trial import CannotSave, Trial
from pytest_ckpt.save.modes import MODES
from pytest_ckpt.world.interface import RankFailure

pytestmark = pytest.mark.ckpt_acceptance

STATE = DictSpec({f"layer {i}": TensorSpec(shape=(4 * FILE_LIMIT_BYTES // 256, 64), shard=0, seed=i) for i in range(4)})
"""Every rank's files grow beyond what `full` allows."""
STUCK_AFTER_S = 4.0
BOUNDED_S = 30.0


def test_a_full_target_is_told_with_rank_and_reason(ckpt_acceptance: Trial, ckpt_world: object) -> None:
    """No file may grow on one rank, as when one storage server is full: "target full or write failed", and where."""
    culprit = ckpt_acceptance.world.size - 1
    location = ckpt_acceptance.new_location()
    with pytest.raises(CannotSave) as raised:
        ckpt_acceptance.save(STATE, location=location, fault=Fault(at="write", do="full", rank=culprit))
    assert culprit in raised.value.ranks
    told = " ".join(raised.value.hints)
    assert "target full or write failed" in told
    assert f"{location}: " in told
    assert " free" in told


def test_a_rank_that_fails_fails_the_save_on_all_ranks(ckpt_acceptance: Trial) -> None:
    """All ranks raise, the rank at fault is named, and the next save of the same ranks is complete."""
    culprit = ckpt_acceptance.world.size - 1
    told: CannotSave | None = None
    began = time.monotonic()
    try:
        ckpt_acceptance.save(STATE, fault=Fault(at="write", do="raise", rank=culprit))
    except CannotSave as error:
        told = error
    if told is not None:
        assert time.monotonic() - began < BOUNDED_S
        assert told.ranks == [culprit]
        assert "PlantedError: planted in write" in str(told)
    else:
        threads = int(ckpt_acceptance.saving.options.get("thread_count", 1))
        seen = f"rank {culprit} raised in a save with thread_count={threads}, which reported success"
        assert threads > 1, seen
        assert ckpt_acceptance.is_dcps("write_data"), seen
        ckpt_acceptance.known("thread-errors-lost", seen)
    ckpt_acceptance.require_equal(ckpt_acceptance.save(STATE, 1))


def test_a_stuck_rank_is_named_at_the_deadline(ckpt_acceptance: Trial) -> None:
    """A rank that sits in its writer: the others wait in collectives that would tell neither rank nor phase."""
    ckpt_acceptance.require_ranks_that_may_end()
    culprit = ckpt_acceptance.world.size - 1
    ckpt_acceptance.opened()
    began = time.monotonic()
    with pytest.raises(RankFailure) as raised:
        ckpt_acceptance.save(
            STATE, fault=Fault(at="write", do="sleep", rank=culprit), caught=False, timeout_s=STUCK_AFTER_S
        )
    assert time.monotonic() - began < STUCK_AFTER_S + BOUNDED_S
    named = {rank.rank: rank for rank in raised.value.culprits}
    assert named[culprit].what == "stuck"
    assert "save" in named[culprit].phase
    if not MODES[ckpt_acceptance.mode].process:  # there all ranks wait alike, for processes of DCP's own
        assert list(named) == [culprit]


@pytest.mark.parametrize("ckpt_mode", ["async"], indirect=True)
def test_a_save_on_the_group_of_training_ends_in_bounded_time_with_that_reason(ckpt_acceptance: Trial) -> None:
    """Such a save deadlocks after a few collectives; with a group of its own it does not."""
    if ckpt_acceptance.world.size < 2:
        ckpt_acceptance.not_applicable("one rank waits for nobody")
    ckpt_acceptance.require_ranks_that_may_end()
    run, train = ckpt_acceptance.run, in_rank.train_beside_a_save
    apart, shared = ckpt_acceptance.new_location("apart"), ckpt_acceptance.new_location("shared")
    for steps in run(train, timeout_s=BOUNDED_S, location=apart, steps=200, shared=False):
        assert steps == 200
    with pytest.raises(RankFailure, match="an async save was started on the process group that training uses"):
        run(train, timeout_s=STUCK_AFTER_S, location=shared, steps=100_000, shared=True)


def test_a_failed_async_save_is_told_although_nobody_read_its_future(ckpt_acceptance: Trial) -> None:
    """DCP tells it through the future alone; here the test that never looked fails with the reason."""
    if ckpt_acceptance.mode == "sync":
        ckpt_acceptance.not_applicable("a sync save has no future")
    culprit = ckpt_acceptance.world.size - 1
    fault = Fault(at="write", do="raise", rank=culprit)
    with pytest.raises(RankFailure) as raised:
        ckpt_acceptance.start_and_never_look(STATE, fault)
    assert "PlantedError: planted in write" in str(raised.value)
    ckpt_acceptance.known("unread-future", "async_save failed, and only its future tells; pytest-ckpt reads it for you")
