"""A checkpoint is complete on its storage, and damage to it is told."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_ckpt.accept.faults import Fault
from pytest_ckpt.accept.states import EVERY_KIND, DictSpec, TensorSpec, ValueSpec
from pytest_ckpt.accept.trial import CannotSave, NotApplicable, Trial

pytestmark = pytest.mark.ckpt_acceptance

STATE = DictSpec(
    {**{f"layer {i}": TensorSpec(shape=(1024, 64), shard=0, seed=i) for i in range(4)}, "count": ValueSpec(0)}
)


def test_a_save_that_reported_success_is_complete_on_its_storage(ckpt_acceptance: Trial) -> None:
    """Every range lies in an existing file, covers its tensors, and equals its checksum; no file is left over."""
    found = ckpt_acceptance.verify(ckpt_acceptance.save(EVERY_KIND).location)
    assert found.is_complete, found.text
    assert found.entries >= len(EVERY_KIND.items)
    assert not found.orphans, f"nothing refers to {', '.join(orphan.file for orphan in found.orphans)}"


@pytest.mark.parametrize("ckpt_mode", ["sync"], indirect=True)
@pytest.mark.parametrize("damage", ["flipped", "truncated", "removed", "emptied"])
def test_damage_to_a_file_is_told(ckpt_acceptance: Trial, damage: str) -> None:
    """One flipped byte of a tensor, a file cut in half, removed, or emptied: each has a name of its own."""
    saved = ckpt_acceptance.save(STATE)
    do, kind = DAMAGES[damage]
    try:
        before = ckpt_acceptance.verify(saved.location)
    except NotApplicable:
        if damage == "flipped":
            raise
        before = None  # of a format of its own only a load can tell
    if before is not None:
        assert before.is_complete, before.text
        if damage == "flipped" and before.outcome == "no-checksum":
            ckpt_acceptance.not_applicable("the writer stores no checksums: a flipped byte cannot be told")
    ckpt_acceptance.load(STATE, saved.location)  # or a load that always fails would tell any damage
    _damage(_largest_file(saved.location), do)
    if before is not None:
        found = ckpt_acceptance.verify(saved.location)
        assert found.outcome == kind, found.text
    if damage == "flipped":
        return  # whether a load tells it is a promise of its own
    with pytest.raises(CannotSave):
        ckpt_acceptance.load(STATE, saved.location)


@pytest.mark.parametrize("ckpt_mode", ["sync"], indirect=True)
def test_a_load_tells_a_flipped_byte(ckpt_acceptance: Trial) -> None:
    """What was saved with a checksum is compared with it when it is loaded."""
    saved = ckpt_acceptance.save(STATE)
    ckpt_acceptance.require_equal(saved)
    if ckpt_acceptance.verify(saved.location).outcome == "no-checksum":
        ckpt_acceptance.not_applicable("the writer stores no checksums: there is nothing to compare with")
    is_read_by_dcp = ckpt_acceptance.is_read_by_dcp(saved)
    _damage(_largest_file(saved.location), _flip)
    try:
        loaded = ckpt_acceptance.load(STATE, saved.location)
    except CannotSave:
        return
    differing = saved.content.differing(loaded)
    assert differing, "the byte that was flipped is no tensor's: nothing was tried"
    seen = f"{differing[0]} was loaded with one wrong byte, without an error"
    assert is_read_by_dcp, f"{seen}, by a reader that is not DCP's"
    ckpt_acceptance.known("crc-not-checked", seen)


def test_a_failed_overwrite_is_the_old_checkpoint_or_none(ckpt_acceptance: Trial) -> None:
    """A save into the folder of another one fails half way: what is there then must not load as half of each."""
    old = ckpt_acceptance.save(STATE, 1)
    culprit = ckpt_acceptance.world.size - 1
    ckpt_acceptance.require_equal(old)
    with pytest.raises(CannotSave, match="PlantedError"):
        ckpt_acceptance.save(STATE, 2, location=old.location, fault=Fault(at="begin", do="raise", rank=culprit))
    try:
        loaded = ckpt_acceptance.load(STATE, old.location)
    except CannotSave:
        return
    differing = old.content.differing(loaded)
    if not differing:
        return
    seen = f"{len(differing)} of {old.content.entries} entries were loaded from the save that failed, without an error"
    with contextlib.suppress(NotApplicable):  # a format of its own
        assert not ckpt_acceptance.verify(old.location).is_complete, f"{seen}, and nothing in the folder tells it"
    assert ckpt_acceptance.is_dcps("write_data"), seen
    ckpt_acceptance.known("overwrite-mixes", seen)


@pytest.mark.parametrize("ckpt_mode", ["sync"], indirect=True)
def test_a_save_by_fewer_ranks_leaves_no_files_of_the_others(ckpt_acceptance: Trial) -> None:
    """A folder holds what its checkpoint refers to, also where one of more ranks was there before."""
    size = ckpt_acceptance.world.size
    if size < 2:
        ckpt_acceptance.not_applicable("there are no fewer ranks than one")
    before = ckpt_acceptance.save(STATE, 1)
    try:
        after = ckpt_acceptance.save(STATE, 2, location=before.location, world=ckpt_acceptance.world_of(size - 1))
    except CannotSave:
        return  # refused: nothing is mixed
    ckpt_acceptance.require_equal(after)
    found = ckpt_acceptance.verify(after.location)
    assert found.is_complete, found.text
    if found.orphans:
        left = sum(orphan.bytes for orphan in found.orphans)
        seen = f"{len(found.orphans)} files of {left:,} bytes, of {found.folder_bytes:,} in the folder"
        ckpt_acceptance.known("orphans-left", seen)


def _largest_file(location: str) -> Path:
    files = [Path(folder, name) for folder, _, names in os.walk(location) for name in names if name != ".metadata"]
    return max(files, key=lambda file: file.stat().st_size)


def _damage(file: Path, do: Callable[[Path], None]) -> None:
    """Damage the file as a storage does, which changes no times."""
    times = file.stat()
    do(file)
    if file.exists():
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def _flip(file: Path) -> None:
    """Flip a byte in the middle of the file, which is a tensor's: the headers between them are small."""
    with open(file, "r+b") as opened:
        opened.seek(file.stat().st_size * 5 // 8)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 1]))


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _empty(file: Path) -> None:
    os.truncate(file, 0)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (_flip, "corrupt"),
    "truncated": (_cut, "truncated"),
    "removed": (Path.unlink, "missing-file"),
    "emptied": (_empty, "empty-file"),
}
