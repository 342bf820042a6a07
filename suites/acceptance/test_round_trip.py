"""What was saved comes back: bit for bit, to any number of ranks, whatever the state is made of."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_ckpt.accept import in_rank
from pytest_ckpt.accept.states import EVERY_KIND, DictSpec, TensorSpec
from pytest_ckpt.accept.strategies import state_dicts
from pytest_ckpt.accept.trial import Content, Trial

SMALL = DictSpec({"weight": TensorSpec(shape=(5, 3), shard=0, seed=1), "bias": TensorSpec(shape=(3,), seed=2)})

pytestmark = pytest.mark.ckpt_acceptance


def test_state_of_every_kind_comes_back_bit_for_bit(ckpt_acceptance: Trial) -> None:
    """Dtypes, sizes that ranks do not divide, layouts, nesting, names, tied weights, values and objects."""
    ckpt_acceptance.require_equal(ckpt_acceptance.save(EVERY_KIND))


def test_any_state_comes_back_bit_for_bit(ckpt_acceptance: Trial) -> None:
    """As above, for state dicts that Hypothesis makes up; what fails is made as small as can be."""

    def comes_back(spec: DictSpec) -> None:
        saved = ckpt_acceptance.save(spec)
        ckpt_acceptance.require_equal(saved)
        ckpt_acceptance.forget(saved.location)

    ckpt_acceptance.for_all(state_dicts(), comes_back)


def test_another_number_of_ranks_loads_the_same(ckpt_acceptance: Trial, ckpt_world: Any) -> None:
    """One rank more and one rank less than saved it: a restart on other machines."""
    saved = ckpt_acceptance.save(EVERY_KIND)
    for size in {ckpt_world.size + 1, max(1, ckpt_world.size - 1)} - {ckpt_world.size}:
        ckpt_acceptance.require_equal(saved, world=ckpt_acceptance.world_of(size))


def test_training_goes_on_after_a_load_as_without_one(ckpt_acceptance: Trial) -> None:
    """One step of an FSDP model and its optimizer after a load equals that step without the save, bit for bit."""
    location = ckpt_acceptance.new_location()
    replies = ckpt_acceptance.run(in_rank.step_with_and_without_a_load, location=location)
    without, after = (Content([reply[which] for reply in replies]) for which in ("without", "with"))
    assert without.entries > 0
    assert not without.differing(after)


@pytest.mark.parametrize("ckpt_mode", ["sync"], indirect=True)
def test_an_optimizer_that_never_stepped_gets_all_of_its_state(ckpt_acceptance: Trial) -> None:
    """Entries are counted on both sides: a load that brings none of them back says nothing."""
    ckpt_acceptance.require_equal(ckpt_acceptance.save(SMALL))  # else any error would do for the one that is looked for
    replies = ckpt_acceptance.run(in_rank.optimizer_that_never_stepped, location=ckpt_acceptance.new_location())
    for reply in replies:
        assert reply["saved"] > 0
    lost = [reply for reply in replies if reply["loaded"] < reply["saved"] and reply["error"] is None]
    if lost:
        seen = f"{lost[0]['loaded']} of {lost[0]['saved']} entries were loaded, without an error"
        ckpt_acceptance.known("optimizer-not-initialised", seen)


@pytest.mark.parametrize("ckpt_mode", ["sync"], indirect=True)
def test_ranks_that_disagree_on_a_replica_are_told(ckpt_acceptance: Trial, ckpt_world: Any) -> None:
    """Values that differ from rank to rank under one key are refused, not reduced to one of them."""
    ckpt_acceptance.require_equal(ckpt_acceptance.save(SMALL))
    if ckpt_world.size < 2:
        ckpt_acceptance.not_applicable("one rank has no replicas")
    replies = ckpt_acceptance.run(in_rank.save_unequal_replicas, location=ckpt_acceptance.new_location())
    content = Content(replies)
    assert content.unequal_replicas == ["replica"]
    if not any(reply["error"] for reply in replies):
        seen = f"{ckpt_world.size} values of one key were saved as one, without an error"
        ckpt_acceptance.known("replicas-reduced", seen)
