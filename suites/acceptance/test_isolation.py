"""A checkpoint is of one step, of its own step, and costs no memory that stays."""

from __future__ import annotations

import os
from itertools import combinations
from statistics import median

import pytest

from pytest_ckpt.accept import in_rank
from pytest_ckpt.accept.faults import Fault
from pytest_ckpt.accept.states import DictSpec, TensorSpec, ValueSpec
from pytest_ckpt.accept.trial import CannotSave, Trial

pytestmark = pytest.mark.ckpt_acceptance

STATE = DictSpec(
    {
        "weights": TensorSpec(shape=(1024, 64), shard=0, seed=1),
        "moments": TensorSpec(shape=(1024, 64), shard=0, seed=2),
        "bias": TensorSpec(shape=(64,), seed=3),
        "step": TensorSpec(shape=(), dtype="int64", seed=4),
        "count": ValueSpec(0),
    }
)
LEAK_BYTES = 40 * 2**20
"""More than 32 MiB: glibc then gives each block pages of its own and takes them back, and what is resident is held."""
LEAK_SAVES = 8
LEAK_SHARE = 0.05
"""Of the state, what a save may leave in memory: with 3 to 8 saves behind it, the slope of the resident bytes."""


def test_a_checkpoint_is_of_one_step_while_training_goes_on(ckpt_acceptance: Trial) -> None:
    """Weights and the step change as soon as the save allows it, and only then is anything written."""
    if ckpt_acceptance.mode == "sync":
        ckpt_acceptance.not_applicable("training stands still while a sync save runs")
    go = os.path.join(os.path.dirname(ckpt_acceptance.new_location("go")), f"go-{ckpt_acceptance.mode}")
    saved = ckpt_acceptance.save(STATE, 1, then_step=2, fault=Fault(at="begin", do="hold", go=go))
    os.unlink(go)
    ckpt_acceptance.require_equal(saved)


def test_each_checkpoint_is_of_its_own_step(ckpt_acceptance: Trial) -> None:
    """Three saves of a state that training changes in place; each loads the values that it was saved with."""
    saves = [ckpt_acceptance.save(STATE, step) for step in (1, 2, 3)]
    for saved in saves:
        ckpt_acceptance.require_equal(saved)


def test_a_load_before_the_save_is_done_fails(ckpt_acceptance: Trial) -> None:
    """What is not complete is no checkpoint: half of it is written when it is loaded, and nothing comes back."""
    ckpt_acceptance.load(STATE, ckpt_acceptance.save(STATE).location)  # or a load that always fails would do
    half = ckpt_acceptance.new_location()
    with pytest.raises(CannotSave, match="PlantedError"):
        ckpt_acceptance.save(STATE, location=half, fault=Fault(at="metadata", do="raise", rank=0))
    with pytest.raises(CannotSave):
        ckpt_acceptance.load(STATE, half)


def slope(resident: list[int]) -> float:
    """Return by how much the values grow from one to the next: the median over all pairs, so that one step is none."""
    pairs = combinations(enumerate(resident), 2)
    return median((later - earlier) / (j - i) for (i, earlier), (j, later) in pairs)


def test_saves_leave_no_memory_behind(ckpt_acceptance: Trial) -> None:
    """Resident bytes over saves 3 to 8 grow by less than 5 % of the state a save, on every rank."""
    folder = ckpt_acceptance.new_location("memory")
    replies = ckpt_acceptance.run(
        in_rank.memory_after_saves, folder=folder, saves=LEAK_SAVES, state_bytes=LEAK_BYTES, timeout_s=300
    )
    slopes = [slope(resident[2:]) for resident in replies]
    assert max(slopes) < LEAK_SHARE * LEAK_BYTES, f"each save leaves {max(slopes):,.0f} bytes of {LEAK_BYTES:,}"
