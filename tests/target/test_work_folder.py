"""The folder of a run: made, tried, written to, deleted, and nothing else touched."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_ckpt.errors import SettingError, TargetVanished
from pytest_ckpt.target.clean import clean, find_leftovers
from pytest_ckpt.target.interface import WorkFolder
from pytest_ckpt.target.marker import MARKER
from pytest_ckpt.target.path import PathTarget
from pytest_ckpt.target.spec import TargetSpec

from .conftest import NOBODY, OtherRun

Snapshot = dict[str, tuple[bytes | str, int, int, int]]


def snapshot(folder: Path) -> Snapshot:
    """Return the content, mode, owner and date of all below `folder`."""
    found: Snapshot = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content: bytes | str = b""
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = path.read_bytes()
        found[str(path)] = (content, status.st_mode, status.st_uid, status.st_mtime_ns)
    return found


def fill(folder: Path) -> None:
    """Put into `folder` all sorts of things that people may have there."""
    (folder / "checkpoint" / "step-1").mkdir(parents=True)
    (folder / "checkpoint" / "step-1" / ".metadata").write_bytes(os.urandom(999))
    (folder / "link").symlink_to("checkpoint")
    (folder / "dangling").symlink_to("nowhere")
    (folder / MARKER).write_text("{}")
    (folder / "pytest-ckpt-notes").mkdir()
    (folder / "pytest-ckpt-notes" / "a").write_text("a")
    (folder / "pytest-ckpt-abcdefgh").write_text("a file, not a folder")
    (folder / "pytest-ckpt-abcdefg1").symlink_to("checkpoint")
    for path in folder.rglob("*"):
        os.utime(path, ns=(10**18, 10**18), follow_symlinks=False)


def test_work_folder_is_private_and_marked_and_goes_when_closed(target: PathTarget) -> None:
    work: WorkFolder = target.open()
    folder = Path(work.location)
    assert folder.parent == Path(target.location)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.listdir(folder) == [MARKER]
    assert work.close() is None
    assert os.listdir(target.location) == []
    assert work.close() is None


def test_rounds_are_fresh_inside_and_never_the_same(target: PathTarget) -> None:
    work = target.open()
    names = ["sync", "sync", "../../etc", "", "a/b", "..", "ünï" * 200]
    rounds = [work.new_round(name) for name in names]
    assert len(set(rounds)) == len(names)
    for location in rounds:
        assert os.path.dirname(location) == work.location
        assert not os.path.lexists(location)
        os.mkdir(location)
    work.close()


def test_round_is_removed_alone_and_a_missing_one_is_no_error(target: PathTarget) -> None:
    work = target.open()
    first, second = Path(work.new_round("a")), Path(work.new_round("a"))
    for folder in (first, second):
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "shard").write_bytes(b"x" * 100)
    assert work.bytes_in(str(first)) == 100
    work.remove(str(first))
    work.remove(str(first))
    assert not first.exists()
    assert work.bytes_in(str(second)) == 100
    second.joinpath("deep/shard").rename(first)
    work.remove(str(first))
    assert not first.exists()
    work.close()


def test_remove_refuses_everything_that_is_no_round(target: PathTarget) -> None:
    mine = Path(target.location, "mine")
    mine.write_text("mine")
    work = target.open()
    inside = Path(work.location)
    (inside / "link").symlink_to(target.location)
    refused = [
        target.location,
        work.location,
        work.location + "/",
        str(mine),
        "",
        "/",
        "0001-sync",
        f"{work.location}/..",
        f"{work.location}/../mine",
        f"{work.location}/./0001",
        f"{work.location}/{MARKER}",
        f"{work.location}/link",
        f"{work.location}/link/mine",
        f"{work.location}x/0001",
    ]
    for location in refused:
        with pytest.raises(ValueError, match="is not deleted"):
            work.remove(location)
    assert (mine.read_text(), (inside / MARKER).exists()) == ("mine", True)
    work.close()


def test_link_inside_that_points_outside_leaves_the_outside(target: PathTarget) -> None:
    outside = Path(target.location, "outside")
    outside.mkdir()
    (outside / "file").write_text("mine")
    before = snapshot(outside)
    work = target.open()
    first = Path(work.new_round("a"))
    first.mkdir()
    (first / "link").symlink_to(outside)
    (Path(work.location) / "link").symlink_to(outside)
    work.remove(str(first))
    work.close()
    assert snapshot(outside) == before
    assert os.listdir(target.location) == ["outside"]


def test_folder_put_in_the_place_of_the_work_folder_is_not_deleted(target: PathTarget) -> None:
    work = target.open()
    os.rename(work.location, work.location + ".moved")
    os.mkdir(work.location)
    Path(work.location, "mine").write_text("mine")
    with pytest.raises(OSError, match="stands in its place"):
        work.close()
    assert Path(work.location, "mine").read_text() == "mine"


def test_link_put_in_the_place_of_the_work_folder_is_not_followed(target: PathTarget, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / MARKER).write_text("mine")
    work = target.open()
    os.rename(work.location, work.location + ".moved")
    os.symlink(tmp_path / "outside", work.location)
    with pytest.raises(OSError, match="stands in its place"):
        work.close()
    assert (tmp_path / "outside" / MARKER).read_text() == "mine"


@pytest.mark.parametrize("replaced", [False, True])
def test_folder_that_is_not_where_it_was_gives_no_rounds_and_no_sizes(target: PathTarget, replaced: bool) -> None:
    """A writer makes a missing folder anew, perhaps on another file system: its figures would be another storage's."""
    work = target.open()
    location = work.new_round("a")
    os.rename(work.location, work.location + ".moved")
    if replaced:
        os.makedirs(location)
    for use in (lambda: work.new_round("b"), lambda: work.bytes_in(location)):
        with pytest.raises(TargetVanished, match="unmounted, moved or replaced"):
            use()
    if replaced:
        assert os.path.isdir(location)


def test_closed_work_folder_gives_no_more_rounds(target: PathTarget) -> None:
    work = target.open()
    work.close()
    with pytest.raises(RuntimeError, match="is closed"):
        work.new_round("late")
    with pytest.raises(RuntimeError, match="is closed"):
        work.remove(work.location + "/0001-late")


def test_files_that_vanish_while_a_round_is_removed_are_no_error(target: PathTarget) -> None:
    work = target.open()
    folder = Path(work.new_round("async"))
    folder.mkdir()
    for number in range(300):
        (folder / f"{number}.tmp").touch()

    def end_writing() -> None:
        for number in range(300):
            with contextlib.suppress(FileNotFoundError):
                os.rename(folder / f"{number}.tmp", folder / f"{number}")

    writer = threading.Thread(target=end_writing)
    writer.start()
    try:
        work.remove(str(folder))
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:  # that is the writer's right: it added to what had been emptied
            raise
    writer.join(timeout=5)
    work.close()
    assert os.listdir(target.location) == []


def test_kept_folder_stays_and_is_neither_leftover_nor_cleaned_unless_asked(target: PathTarget) -> None:
    work = target.open()
    first = Path(work.new_round("a"))
    first.mkdir()
    (first / "shard").write_bytes(b"x" * 100)
    assert work.close(keep=True) == work.location
    assert (first / "shard").exists()
    assert target.leftovers() == []
    assert [found.state for found in find_leftovers(target.location)] == ["kept"]
    assert clean(target.location).removed == []
    assert first.exists()
    assert [found.path for found in clean(target.location, include_kept=True).removed] == [work.location]
    assert os.listdir(target.location) == []


def test_run_that_filled_its_target_can_still_keep_its_folder(mounted: Callable[..., Path]) -> None:
    point = mounted("tmpfs", "none", "size=1m")
    work = PathTarget(TargetSpec("t", str(point))).open()
    with pytest.raises(OSError, match="No space left"), open(work.new_round("a"), "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert work.close(keep=True) == work.location
    assert [found.state for found in find_leftovers(str(point))] == ["kept"]


@pytest.mark.parametrize(
    ("call", "operation"),
    [
        ("rename", "rename"),
        ("fsync", "create a file"),
        ("unlink", "delete a file"),
        ("mkdir", "mkdir"),
        ("rmdir", "delete a folder"),
        ("write", "write"),
    ],
)
def test_refused_operation_is_named_with_its_errno_before_any_data(
    target: PathTarget, monkeypatch: pytest.MonkeyPatch, call: str, operation: str
) -> None:
    """FUSE over an object store answers ENOSYS to rename, which a save would meet last of all."""
    real = getattr(os, call)

    def refuse_once(*arguments: object, **options: object) -> None:
        monkeypatch.setattr(os, call, real)
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, call, refuse_once)
    with pytest.raises(SettingError, match=rf"refuses to {operation} \(ENOSYS: .*; choose another") as caught:
        target.open()
    assert target.location in str(caught.value)
    assert os.listdir(target.location) == []


def test_target_that_gives_back_other_bytes_is_refused(target: PathTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:-1] + b"?") if fd > 2 else real(fd, data))
    with pytest.raises(SettingError, match=r"refuses to read back \(EIO"):
        target.open()
    assert os.listdir(target.location) == []


def test_what_cannot_be_removed_after_a_refusal_is_named(target: PathTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(SettingError, match=r"refuses to delete a file .* nor could .* be removed again"):
        target.open()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")
def test_target_that_gives_files_to_another_user_is_refused(
    target: PathTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS with root squashed: we could not tell our own folders from others."""
    real = tempfile.mkdtemp

    def squashing(*arguments: object, **options: str) -> str:
        folder = real(**options)
        os.chown(folder, NOBODY, NOBODY)
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", squashing)
    with pytest.raises(SettingError, match=f"gives uid {NOBODY} what uid 0 makes there"):
        target.open()
    assert os.listdir(target.location) == []


def test_full_target_is_refused_before_any_data(mounted: Callable[..., Path]) -> None:
    point = mounted("tmpfs", "none", "size=64k")
    with pytest.raises(OSError, match="No space left"), (point / "big").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(SettingError, match="ENOSPC"):
        PathTarget(TargetSpec("t", str(point))).open()
    assert os.listdir(point) == ["big"]


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_real_file_systems_serve_from_opening_to_cleaning(
    kind: str, request: pytest.FixtureRequest, other_run: OtherRun
) -> None:
    if kind == "ext4":
        point: Path = request.getfixturevalue("ext4")
    else:
        point = request.getfixturevalue("mounted")("tmpfs", "none", "size=1m")
    before = os.listdir(point)
    target = PathTarget(TargetSpec("t", str(point)))
    work = target.open()
    os.mkdir(work.new_round("a"))
    process, _ = other_run(str(point))
    process.kill()
    process.wait(timeout=5)
    assert len(clean(str(point)).removed) == 1
    work.close()
    assert os.listdir(point) == before


def test_other_files_stay_byte_for_byte_and_date_for_date(target: PathTarget, other_run: OtherRun) -> None:
    folder = Path(target.location)
    fill(folder)
    before = snapshot(folder)
    target.check()
    work = target.open()
    os.mkdir(work.new_round("a"))
    process, _ = other_run(target.location)
    process.kill()
    process.wait(timeout=5)
    find_leftovers(target.location)
    assert len(clean(target.location, include_kept=True).removed) == 1
    work.close()
    assert snapshot(folder) == before


def test_two_work_folders_at_once_do_not_meet(target: PathTarget) -> None:
    first, second = target.open(), target.open()
    os.mkdir(second.new_round("a"))
    first.close()
    assert os.listdir(target.location) == [os.path.basename(second.location)]
    assert target.leftovers() == []
    second.close()
    assert os.listdir(target.location) == []


def test_programs_that_the_run_starts_do_not_hold_its_lock(target: PathTarget) -> None:
    """A daemon that outlives a killed run would make its folder live for ever."""
    work = target.open()
    held = [int(fd) for fd in os.listdir("/proc/self/fd") if work.location in os.path.realpath(f"/proc/self/fd/{fd}")]
    assert len(held) == 2
    assert not any(os.get_inheritable(fd) for fd in held)
    work.close()


def test_python_that_might_follow_links_while_deleting_deletes_nothing(
    target: PathTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = target.open()
    os.mkdir(work.new_round("a"))
    monkeypatch.setattr(shutil.rmtree, "avoids_symlink_attacks", False)
    with pytest.raises(OSError, match="might follow links"):
        work.close()
    assert len(os.listdir(work.location)) == 2


def test_deletion_that_was_cut_short_can_be_finished_by_clean(
    target: PathTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = target.open()
    os.mkdir(work.new_round("a"))
    with monkeypatch.context() as patch:
        patch.setattr(shutil.rmtree, "avoids_symlink_attacks", False)
        with pytest.raises(OSError, match="might follow links"):
            work.close()
    assert [found.state for found in target.leftovers()] == ["dead"]
    assert len(clean(target.location).removed) == 1
    assert os.listdir(target.location) == []
