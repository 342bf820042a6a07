"""A save that returned is on the storage: a power cut does not take it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_ckpt.accept.power_cut import PowerCut, why_no_power_cut
from pytest_ckpt.accept.states import DictSpec, TensorSpec, ValueSpec
from pytest_ckpt.accept.trial import CannotSave, Trial
from pytest_ckpt.save.modes import MODES

pytestmark = pytest.mark.ckpt_acceptance

STATE = DictSpec(
    {**{f"layer {i}": TensorSpec(shape=(1024, 64), shard=0, seed=i) for i in range(8)}, "count": ValueSpec(0)}
)
MOST_LETTERS = 160
CAPACITY_BYTES = 32 * 2**20


def test_what_a_save_reported_as_done_is_synced(ckpt_acceptance: Trial) -> None:
    """Which bytes were synced when, whether files were renamed after that, and whether the folder was synced too."""
    _require_durability_was_asked_for(ckpt_acceptance)
    if MODES[ckpt_acceptance.mode].process:
        ckpt_acceptance.not_applicable("a background process of DCP's writes, which cannot be watched here")
    seen = ckpt_acceptance.save(STATE, audited=True).audit
    assert seen is not None
    if seen.verdict == "cannot tell":
        ckpt_acceptance.not_applicable(" ".join(seen.sentences))
    if not seen.is_durable:
        told = " ".join(seen.sentences)
        assert ckpt_acceptance.is_dcps("write_data", "finish"), told
        ckpt_acceptance.known("not-durable", told)


def test_a_power_cut_after_a_save_takes_nothing(ckpt_acceptance: Trial, tmp_path: Path) -> None:
    """An ext4 volume of its own, whatever the target is: it judges the writer, not the storage.

    Its device is copied the moment the save returns; the copy is mounted and loaded.
    """
    _require_durability_was_asked_for(ckpt_acceptance)
    ckpt_acceptance.require_one_host()
    why = why_no_power_cut()
    if why is not None:
        ckpt_acceptance.not_applicable(f"no power cut can be made here: {why}")
    with PowerCut(tmp_path, CAPACITY_BYTES) as power:
        saved = ckpt_acceptance.save(STATE, location=f"{power.location}/ckpt")
        after = f"{power.cut()}/ckpt"
        try:
            ckpt_acceptance.require_equal(saved, location=after)
        except CannotSave as error:
            seen = f"after the cut: {str(error).splitlines()[0][:MOST_LETTERS]}"
            assert ckpt_acceptance.is_dcps("write_data", "finish"), seen
            ckpt_acceptance.known("not-durable", seen)


def _require_durability_was_asked_for(trial: Trial) -> None:
    if trial.is_memory:
        trial.not_applicable("the target is memory, which no power cut spares")
    if trial.saving.options.get("sync_files") is False:
        trial.not_applicable("sync_files=off asks for no sync")
