"""A save that is killed leaves the last complete checkpoint as it was, and is no checkpoint itself."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_ckpt.accept.faults import Fault
from pytest_ckpt.accept.states import DictSpec, TensorSpec, ValueSpec
from pytest_ckpt.accept.trial import CannotSave, Saved, Trial
from pytest_ckpt.save.modes import MODES
from pytest_ckpt.world.interface import RankFailure

pytestmark = pytest.mark.ckpt_acceptance

STATE = DictSpec(
    {**{f"layer {i}": TensorSpec(shape=(512, 64), shard=0, seed=i) for i in range(6)}, "count": ValueSpec(0)}
)


def test_a_rank_terminated_while_it_stages_leaves_the_last_checkpoint(ckpt_acceptance: Trial) -> None:
    """SIGTERM on one rank, as a scheduler sends it, before anything is written."""
    if ckpt_acceptance.mode == "sync":
        ckpt_acceptance.not_applicable("a sync save stages nothing")
    fault = Fault(at="stage", do="terminate", rank=ckpt_acceptance.world.size - 1)
    last, torn = _killed(ckpt_acceptance, fault)
    _require_torn(ckpt_acceptance, torn)
    ckpt_acceptance.require_equal(last)


def test_a_rank_killed_while_it_writes_leaves_the_last_checkpoint(ckpt_acceptance: Trial) -> None:
    """SIGKILL on one rank with half of its tensors written; then a save into what it left."""
    _require_ranks_write(ckpt_acceptance)
    fault = Fault(at="write", do="kill", rank=ckpt_acceptance.world.size - 1)
    last, torn = _killed(ckpt_acceptance, fault)
    _require_torn(ckpt_acceptance, torn)
    ckpt_acceptance.require_equal(last)
    try:  # a leftover may be refused, by all ranks at once, or overwritten
        again = ckpt_acceptance.save(STATE, 3, location=torn, timeout_s=30)
    except CannotSave:
        return
    ckpt_acceptance.require_equal(again)


def test_all_ranks_killed_before_the_metadata_leave_the_last_checkpoint(ckpt_acceptance: Trial) -> None:
    """SIGKILL on every rank when all tensors are written and nothing says yet where."""
    _require_ranks_write(ckpt_acceptance)
    pids = [reply["pid"] for reply in ckpt_acceptance.opened()]
    last, torn = _killed(ckpt_acceptance, Fault(at="metadata", do="kill", rank=0, pids=pids))
    _require_torn(ckpt_acceptance, torn)
    ckpt_acceptance.require_equal(last)


def test_a_save_of_the_model_is_complete_within_the_grace_period(ckpt_acceptance: Trial, ckpt_model: Any) -> None:
    """Between SIGTERM and SIGKILL a scheduler leaves --ckpt-grace: a save that begins then has to be complete."""
    saved = ckpt_acceptance.save_model(ckpt_model)
    ckpt_acceptance.require_equal_model(saved)
    grace_s = ckpt_acceptance.grace_s
    assert saved.seconds <= grace_s, (
        f"a save of {ckpt_model.name} took {saved.seconds:.1f} s, and --ckpt-grace leaves {grace_s:.1f} s"
    )


def _require_ranks_write(trial: Trial) -> None:
    if MODES[trial.mode].process:
        trial.not_applicable("the ranks write nothing in this mode: background processes of DCP's do")


def _killed(trial: Trial, fault: Fault) -> tuple[Saved, str]:
    """Return a complete checkpoint, and where a save that `fault` ended left what it had written by then."""
    trial.require_ranks_that_may_end()
    last, torn = trial.save(STATE, 1), trial.new_location("torn")
    with pytest.raises(RankFailure) as raised:
        trial.save(STATE, 2, location=torn, fault=fault, caught=False, timeout_s=60)
    died = {rank.rank for rank in raised.value.culprits if rank.what == "died"}
    assert (set(range(trial.world.size)) if fault.pids else {fault.rank}) <= died
    return last, torn


def _require_torn(trial: Trial, location: str) -> None:
    with pytest.raises((CannotSave, RankFailure)):
        trial.load(STATE, location)
