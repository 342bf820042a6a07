"""A healthy checkpoint of DCP is called complete, whoever copied it; damage is named, and never called complete."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from pytest_ckpt.accept.checkpoint_folder import born_ns
from pytest_ckpt.accept.verify import KINDS, OUTCOMES, verify
from pytest_ckpt.errors import SettingError
from pytest_ckpt.records import Verification
from pytest_ckpt.report.verification import verification_lines
from pytest_ckpt.world.spawned import SpawnedWorld

from ..scaling import growth_exponent
from . import checkpoints
from .damage import copied, covered_ranges, flip, truncate

pytestmark = pytest.mark.timeout(180)

CHECKED = ["plain", "threads", "file-per-tensor", "without-collectives", "fewer-threads"]
UNCHECKED = ["no-crc32", "safetensors", "hugging-face", "consolidated"]


@pytest.fixture(scope="module")
def world() -> Iterator[SpawnedWorld]:
    world = SpawnedWorld(2, timeout_s=120)
    yield world
    world.close()


@pytest.fixture(scope="module")
def saved(world: SpawnedWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each kind, saved by two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    world.run(checkpoints.save_all_kinds, folder=str(folder))
    return folder


@pytest.fixture
def plain(saved: Path, tmp_path: Path) -> Path:
    """A copy of one, to be damaged."""
    return copied(saved / "plain", tmp_path / "plain")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that one process saved without a process group."""
    path = tmp_path_factory.mktemp("alone") / "checkpoint"
    state = {"weight": torch.randn(50, 7), "small": torch.arange(3), "step": 7, "bf16": torch.ones(5).bfloat16()}
    save(state, storage_writer=FileSystemWriter(path), no_dist=True)
    return path


def only_problem(found: Verification) -> tuple[str, str, str]:
    (problem,) = found.problems
    assert found.outcome == problem.kind
    assert not found.is_complete
    return problem.kind, problem.file, problem.entry


# Healthy


@pytest.mark.parametrize("kind", CHECKED)
def test_a_healthy_checkpoint_is_complete_and_equal_to_its_checksums(kind: str, saved: Path) -> None:
    found = verify(str(saved / kind))
    assert (found.outcome, found.problems) == ("ok", [])
    assert found.verdicts == {"ok": found.entries}
    assert found.read_bytes == found.stored_bytes
    assert found.text.startswith(f"complete: {found.entries} entries, ")


@pytest.mark.parametrize("kind", UNCHECKED)
def test_a_healthy_checkpoint_without_checksums_is_never_called_bad(kind: str, saved: Path) -> None:
    found = verify(str(saved / kind))
    assert (found.outcome, found.problems, found.is_complete) == ("no-checksum", [], True)
    assert found.verdicts == {"no-checksum": found.entries}
    assert found.checked_bytes == 0
    assert "carry no checksum" in found.text


def test_the_entries_and_bytes_are_those_of_dcps_own_metadata(saved: Path) -> None:
    listed = FileSystemReader(str(saved / "plain")).read_metadata()
    found = verify(str(saved / "plain"))
    assert found.entries == len(listed.storage_data)
    assert found.stored_bytes == sum(info.length for info in listed.storage_data.values())
    assert found.checked_bytes == sum(end - begin for _, begin, end in covered_ranges(saved / "plain"))
    assert (found.files, found.orphans, found.other_files) == (2, [], 0)


def test_verifying_takes_neither_torch_nor_a_process_group(saved: Path) -> None:
    program = (
        "import sys; from pytest_ckpt.accept.verify import verify; found = verify(sys.argv[1]); "
        "print(found.outcome, sorted({'torch', 'numpy', 'pytest'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(saved / "plain")], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "ok []\n"


@pytest.mark.parametrize("command", ["cp -r", "cp -a", "cp -rT --reflink=never", "rsync -r", "rsync -a"])
def test_a_copy_is_as_good_as_what_was_copied(command: str, saved: Path, tmp_path: Path) -> None:
    program, *options = command.split()
    if shutil.which(program) is None:
        pytest.skip(f"no {program} here")
    to = tmp_path / "copy"
    to.mkdir()
    subprocess.run([program, *options, f"{saved / 'plain'}/.", str(to)], check=True, timeout=60)
    assert verify(str(to)).outcome == "ok"


@pytest.mark.parametrize(
    "order", [(".metadata", "__0_0.distcp", "__1_0.distcp"), ("__0_0.distcp", ".metadata", "__1_0.distcp")]
)
def test_a_copy_that_keeps_no_times_is_warned_of_and_not_called_bad(
    order: tuple[str, ...], saved: Path, tmp_path: Path
) -> None:
    to = tmp_path / "copy"
    to.mkdir()
    for name in order:
        shutil.copyfile(saved / "plain" / name, to / name)
        time.sleep(0.02)  # a tick of the clock that the kernel stamps files by
    found = verify(str(to))
    assert (found.outcome, [warning.kind for warning in found.warnings]) == ("ok", ["times"])


def test_a_link_to_a_checkpoint_is_followed(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(saved / "plain")
    assert verify(str(tmp_path / "latest")).outcome == "ok"


def test_files_of_others_in_the_folder_are_counted_and_let_be(plain: Path) -> None:
    (plain / "tokenizer.json").write_text("{}")
    found = verify(str(plain))
    assert (found.outcome, found.orphans, found.other_files) == ("ok", [], 1)


def test_shards_that_a_save_with_fewer_files_left_are_listed_with_their_bytes(saved: Path) -> None:
    found = verify(str(saved / "fewer-threads"))
    sizes = {path.name: path.stat().st_size for path in (saved / "fewer-threads").glob("__*_[12].distcp")}
    assert {orphan.file: orphan.bytes for orphan in found.orphans} == sizes
    assert len(sizes) == 4
    assert found.is_complete
    assert found.folder_bytes > found.stored_bytes + sum(sizes.values())


# Damage


def test_flip_truncate_remove_and_empty_have_four_names(plain: Path, tmp_path: Path) -> None:
    file, begin, _ = max(covered_ranges(plain), key=lambda run: run[2] - run[1])
    assert verify(str(plain)).is_complete
    flipped = copied(plain, tmp_path / "1")
    flip(flipped / file, begin + 1000)
    cut = copied(plain, tmp_path / "2")
    truncate(cut / file, begin + 1000)
    removed = copied(plain, tmp_path / "3")
    (removed / file).unlink()
    emptied = copied(plain, tmp_path / "4")
    truncate(emptied / file, 0)
    found = [only_problem(verify(str(path))) for path in (flipped, cut, removed, emptied)]
    assert [kind for kind, _, _ in found] == ["corrupt", "truncated", "missing-file", "empty-file"]
    assert {name for _, name, _ in found} == {file}
    assert found[0][2].startswith("large[")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.parametrize("kind", ["plain", "without-collectives"])
def test_any_bit_that_a_checksum_covers_is_found(kind: str, data: st.DataObject, saved: Path, tmp_path: Path) -> None:
    checkpoint = copied(saved / kind, tmp_path / "damaged")
    ranges = covered_ranges(saved / kind) if kind == "plain" else covered_ranges_of_ranks(saved / kind)
    large = [run for run in ranges if run[2] - run[1] > 2**20]  # read in blocks, not out of one
    file, begin, end = data.draw(st.sampled_from(ranges) | st.sampled_from(large))
    flip(checkpoint / file, data.draw(st.integers(begin, end - 1)), data.draw(st.integers(0, 7)))
    kind_found, file_found, _ = only_problem(verify(str(checkpoint)))
    assert (kind_found, file_found) == ("corrupt", file)


def covered_ranges_of_ranks(checkpoint: Path) -> list[tuple[str, int, int]]:
    """The same, where each rank has metadata of its own, which is put in the place of the common one to be read."""
    found = []
    for own in checkpoint.glob("__*.metadata"):
        os.link(own, checkpoint / ".metadata")
        try:
            found += covered_ranges(checkpoint)
        finally:
            (checkpoint / ".metadata").unlink()
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_damage_to_a_data_file_ends_in_anything_but_a_verdict(
    data: st.DataObject, alone: Path, tmp_path: Path
) -> None:
    checkpoint = copied(alone, tmp_path / "damaged")
    file = checkpoint / "__0_0.distcp"
    before = file.read_bytes()
    position = data.draw(st.integers(0, len(before) - 1))
    new = {
        "truncate": before[:position],
        "flip": before[:position] + bytes([before[position] ^ 4]) + before[position + 1 :],
        "zero": before[:position] + bytes(data.draw(st.integers(1, 5000))),
        "replace": before[:position] + data.draw(st.binary(min_size=1, max_size=200)),
    }[data.draw(st.sampled_from(["truncate", "flip", "zero", "replace"]))]
    after = (new + before[len(new) :])[: len(before)] if len(new) > position else new
    file.write_bytes(after)
    os.utime(file, ns=(0, 0))
    found = verify(str(checkpoint))
    assert found.outcome in ("ok", "truncated", "empty-file", "corrupt", "corrupt-header")
    if len(after) < len(before):
        assert found.outcome == ("truncated" if position else "empty-file")
    if any(before[begin:end] != after[begin:end] for _, begin, end in covered_ranges(alone)):
        assert not found.is_complete


def test_damage_where_no_checksum_is_is_not_taken_for_a_wrong_one(saved: Path, tmp_path: Path) -> None:
    for kind in UNCHECKED[:3]:
        checkpoint = copied(saved / kind, tmp_path / kind)
        file = max(checkpoint.rglob("*[0-9].*"), key=lambda path: path.stat().st_size)
        flip(file, file.stat().st_size // 2)
        assert verify(str(checkpoint)).outcome == "no-checksum"
        truncate(file, file.stat().st_size // 2)
        assert verify(str(checkpoint)).outcome == "truncated"
        truncate(file, 0)
        assert verify(str(checkpoint)).outcome == "empty-file"
        file.unlink()
        assert verify(str(checkpoint)).outcome in ("missing-file", "hole")


def test_a_damaged_header_of_a_record_is_named_as_such(plain: Path) -> None:
    file, begin, _ = max(covered_ranges(plain), key=lambda run: run[2] - run[1])
    name = (plain / file).read_bytes().rfind(b"/data/0", 0, begin)
    flip(plain / file, name + 1)
    assert only_problem(verify(str(plain)))[0] == "corrupt-header"


def test_an_entry_of_other_values_is_found_by_its_size(alone: Path, tmp_path: Path) -> None:
    checkpoint = copied(alone, tmp_path / "checkpoint")
    listed = FileSystemReader(str(checkpoint)).read_metadata()
    indexes = {index.fqn: index for index in listed.storage_data}
    listed.storage_data[indexes["small"]] = listed.storage_data[indexes["bf16"]]
    (checkpoint / ".metadata").write_bytes(pickle.dumps(listed))
    assert only_problem(verify(str(checkpoint))) == ("size-differs", "__0_0.distcp", "small[0]")


def test_a_chunk_that_is_not_listed_is_a_hole(plain: Path) -> None:
    listed = FileSystemReader(str(plain)).read_metadata()
    del listed.state_dict_metadata["weight"].chunks[1]  # type: ignore[union-attr]
    (plain / ".metadata").write_bytes(pickle.dumps(listed))
    found = verify(str(plain))
    assert only_problem(found) == ("hole", "", "weight")
    assert found.problems[0].text == "120 of its 240 elements are in no chunk"


def test_an_entry_without_a_place_is_a_hole(plain: Path) -> None:
    listed = FileSystemReader(str(plain)).read_metadata()
    listed.storage_data = {index: info for index, info in listed.storage_data.items() if index.fqn != "step"}
    (plain / ".metadata").write_bytes(pickle.dumps(listed))
    assert only_problem(verify(str(plain))) == ("hole", "", "step")


def test_a_missing_shard_of_a_row_of_numbers_is_seen_and_a_missing_last_one_warned_of(
    saved: Path, tmp_path: Path
) -> None:
    first, last = (f"shard-{number:05}-model-00001-of-00001.safetensors" for number in (1, 2))
    checkpoint = copied(saved / "hugging-face", tmp_path / "checkpoint")
    (checkpoint / first).unlink()
    found = verify(str(checkpoint))
    assert found.problems[0].kind == "missing-file"
    checkpoint = copied(saved / "hugging-face", tmp_path / "checkpoint")
    (checkpoint / last).unlink()
    found = verify(str(checkpoint))
    assert [warning.kind for warning in found.warnings] == ["unknown-end"]


def test_ranks_that_left_no_metadata_of_their_own_are_missed(saved: Path, tmp_path: Path) -> None:
    checkpoint = copied(saved / "without-collectives", tmp_path / "checkpoint")
    (checkpoint / "__0.metadata").unlink()
    found = verify(str(checkpoint))
    assert (found.problems[0].kind, found.problems[0].file) == ("missing-file", "__0.metadata")
    assert {problem.kind for problem in found.problems} == {"missing-file", "hole"}


# Saves that did not end


def test_a_failed_save_over_a_checkpoint_is_a_mix(world: SpawnedWorld, tmp_path: Path) -> None:
    location = tmp_path / "mix"
    ended = world.run(checkpoints.save_over, location=str(location), fails=True)
    assert ended == [False, False]
    assert FileSystemReader(str(location)).read_metadata().storage_data  # DCP would load it without a word
    found = verify(str(location))
    assert only_problem(found) == ("mix", "__0_0.distcp", "")
    assert found.verdicts == {"ok": 2}  # each half is sound: only their times tell
    assert found.text.startswith("perhaps a mix, not a checkpoint: ")


@pytest.mark.parametrize("change", ["put back", "touched"])
def test_a_file_that_its_owner_changed_in_place_is_taken_as_it_is_on_demand(
    change: str, plain: Path, saved: Path
) -> None:
    """Times cannot tell it from a failed save, and it is not said that they can."""
    time.sleep(0.02)
    if change == "touched":
        os.utime(plain / "__1_0.distcp")
    else:
        shutil.copyfile(saved / "plain" / "__1_0.distcp", plain / "__1_0.distcp")
    found = verify(str(plain))
    assert only_problem(found) == ("mix", "__1_0.distcp", "")
    assert "touch or a repair" in found.text
    assert "--ignore-times" in found.text
    taken = verify(str(plain), ignore_times=True)
    assert (taken.outcome, [warning.kind for warning in taken.warnings]) == ("ok", ["times"])


def test_damage_that_changed_a_files_time_is_still_called_damage(plain: Path) -> None:
    file, begin, _ = covered_ranges(plain)[0]
    time.sleep(0.02)
    with (plain / file).open("r+b") as opened:
        opened.seek(begin)
        opened.write(b"\xff")
    found = verify(str(plain))
    assert only_problem(found)[0] == "corrupt"
    assert [warning.kind for warning in found.warnings] == ["times"]


def test_a_save_over_a_checkpoint_that_ended_is_no_mix(world: SpawnedWorld, tmp_path: Path) -> None:
    location = tmp_path / "over"
    assert world.run(checkpoints.save_over, location=str(location), fails=False) == [True, True]
    found = verify(str(location))
    assert (found.outcome, found.warnings) == ("ok", [])


def test_birth_times_are_told_here_as_a_mix_needs_them(tmp_path: Path) -> None:
    """Without them no test above shows anything: they would all be warnings."""
    before = time.time_ns() - 10**9
    (tmp_path / "file").touch()
    born = born_ns(str(tmp_path / "file"))
    assert born is not None
    assert before < born < before + 60 * 10**9


def test_without_metadata_the_save_did_not_end(plain: Path) -> None:
    (plain / ".metadata").rename(plain / ".metadata.tmp")
    found = verify(str(plain))
    assert (found.outcome, found.is_complete) == ("incomplete", False)
    assert ".metadata.tmp" in found.text
    (plain / ".metadata.tmp").unlink()
    assert verify(str(plain)).outcome == "incomplete"


def test_a_draft_of_metadata_beside_the_real_one_is_left_over(plain: Path) -> None:
    (plain / ".metadata.tmp").write_bytes(b"x")
    found = verify(str(plain))
    assert (found.outcome, [orphan.file for orphan in found.orphans]) == ("ok", [".metadata.tmp"])


# What is no checkpoint, and what would lead out of one


def test_what_is_no_checkpoint_is_said_to_be_none(saved: Path, tmp_path: Path) -> None:
    assert verify(str(tmp_path)).outcome == "no-checkpoint"
    found = verify(str(saved))
    assert found.outcome == "no-checkpoint"
    assert "folders in it do: " in found.text
    for location in (str(tmp_path / "nowhere"), __file__, "s3://bucket/checkpoint"):
        with pytest.raises(SettingError):
            verify(location)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "", "link", "folder/secret", "x\0y"])
def test_no_name_and_no_link_leads_out_of_the_folder(name: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (tmp_path / "secret").write_bytes(b"x" * 100)
    (checkpoint / "link").symlink_to(tmp_path / "secret")
    (checkpoint / "folder").symlink_to(tmp_path)
    write_listing(checkpoint, name, 10)
    assert verify(str(checkpoint)).problems[0].kind == "outside"


def test_a_name_that_no_file_can_have_is_a_missing_file(tmp_path: Path) -> None:
    write_listing(tmp_path, "\ud800x", 10)
    assert verify(str(tmp_path)).problems[0].kind == "missing-file"


def test_a_name_that_differs_from_the_planners_is_damage_and_a_planners_own_names_are_not(plain: Path) -> None:
    listed = FileSystemReader(str(plain)).read_metadata()
    listed.planner_data["weighu"] = listed.planner_data.pop("weight")
    (plain / ".metadata").write_bytes(pickle.dumps(listed))
    found = verify(str(plain))
    assert found.outcome == "unreadable-metadata"
    assert "'weighu'" in found.text
    listed.planner_data["another"] = listed.planner_data.pop("weighu")
    (plain / ".metadata").write_bytes(pickle.dumps(listed))
    assert verify(str(plain)).outcome == "ok"


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    write_listing(tmp_path, "pipe", 10)
    assert verify(str(tmp_path)).problems[0].kind == "outside"
    (tmp_path / ".metadata").unlink()
    os.mkfifo(tmp_path / ".metadata")
    assert verify(str(tmp_path)).outcome == "unreadable-metadata"


def write_listing(checkpoint: Path, name: str, length: int) -> None:
    listed = Metadata({}, storage_data={MetadataIndex("weight", [0]): _StorageInfo(name, 0, length)})
    (checkpoint / ".metadata").write_bytes(pickle.dumps(listed))


def test_a_hostile_metadata_is_refused_and_runs_nothing(plain: Path, tmp_path: Path) -> None:
    (plain / ".metadata").write_bytes(pickle.dumps(_Hostile(str(tmp_path / "ran"))))
    found = verify(str(plain))
    assert found.outcome == "refused-metadata"
    assert found.text == "not verified: .metadata names posix.mkdir, which no checkpoint needs; it isn't loaded"
    assert not (tmp_path / "ran").exists()


class _Hostile:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


# Size


@pytest.mark.long
def test_a_hundred_thousand_entries_take_no_longer_each_than_ten_thousand(tmp_path: Path) -> None:
    """A thousand that DCP saved, ten and a hundred times under other names."""
    state = {f"layer.{number}": torch.full((4,), float(number)) for number in range(1000)}
    save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    listed, data = FileSystemReader(str(tmp_path)).read_metadata(), (tmp_path / "__0_0.distcp").read_bytes()

    def repeated(copies: int) -> tuple[Path, int]:
        many, folder = Metadata({}, storage_data={}), tmp_path / str(copies)
        for copy in range(copies):
            for index, info in listed.storage_data.items():
                many.state_dict_metadata[f"{copy}.{index.fqn}"] = listed.state_dict_metadata[index.fqn]
                place = _StorageInfo("__0_0.distcp", copy * len(data) + info.offset, info.length)
                many.storage_data[MetadataIndex(f"{copy}.{index.fqn}", index.offset)] = place
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(data * copies)
        (folder / ".metadata").write_bytes(pickle.dumps(many))
        return folder, copies * 1000

    def check(checkpoint: tuple[Path, int]) -> None:
        found = verify(str(checkpoint[0]))
        assert (found.outcome, found.entries) == ("ok", checkpoint[1])

    assert growth_exponent(repeated, check, 10, 100) < 1.5


# Lines


def test_every_kind_of_problem_is_described_and_every_outcome_known(plain: Path) -> None:
    flip(plain / "__0_0.distcp", covered_ranges(plain)[0][1])
    assert set(OUTCOMES) - {"ok", "no-checksum"} | {"times", "unknown-end"} == set(KINDS)
    found = verify(str(plain))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Verification) == found


def test_names_that_a_terminal_would_act_on_are_written_out(tmp_path: Path) -> None:
    write_listing(tmp_path, "__0_0\x1b[31m\n.distcp", 10)
    lines = verification_lines(verify(str(tmp_path)))
    assert any("__0_0\\x1b[31m\\n.distcp" in line for line in lines)
    assert all(line.isprintable() for line in lines)
