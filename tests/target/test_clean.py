"""What earlier runs left: found, told apart, and removed only where surely nobody's any more."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import msgspec
import pytest

from pytest_ckpt.errors import SettingError
from pytest_ckpt.target import marker as markers
from pytest_ckpt.target.clean import clean, find_leftovers
from pytest_ckpt.target.interface import Leftover
from pytest_ckpt.target.marker import MARKER, BadMarker, Marker
from pytest_ckpt.target.path import PathTarget
from pytest_ckpt.target.spec import TargetSpec
from pytest_ckpt.target.workfolder import MarkedFolder

from .conftest import NOBODY, OtherRun


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def kill(run: tuple[subprocess.Popen[str], str]) -> str:
    process, folder = run
    process.kill()
    process.wait(timeout=5)
    return folder


def plant(target: PathTarget, name: str = "pytest-ckpt-abcd1234", **changed: object) -> Path:
    """Put a folder there as a run that has ended would have left it, its marker changed as told."""
    folder = Path(target.location, name)
    folder.mkdir(mode=0o700)
    (folder / "shard").write_bytes(b"x" * 10)
    marker = msgspec.structs.replace(markers.new_marker(name, "0" * 32), **changed)
    (folder / MARKER).write_bytes(msgspec.json.encode(marker))
    return folder


def only(found: list[Leftover]) -> Leftover:
    assert len(found) == 1
    return found[0]


def left_alone(target: PathTarget) -> Leftover:
    """Return the only folder there, which `clean` leaves as it is, even if it may remove kept ones."""
    found = only(find_leftovers(target.location))
    result = clean(target.location, include_kept=True)
    assert result.removed == []
    assert (only(result.left).path, only(result.left).state) == (found.path, found.state)
    assert os.path.isdir(found.path)
    return found


def test_folder_of_a_killed_run_is_found_and_cleaned(target: PathTarget, other_run: OtherRun) -> None:
    path = kill(other_run(target.location))
    found = only(target.leftovers())
    assert (found.path, found.state) == (path, "dead")
    assert found.bytes > 5000
    assert found.created is not None
    assert abs(datetime.now(timezone.utc) - found.created) < timedelta(minutes=1)
    assert only(clean(target.location).removed) == found
    assert os.listdir(target.location) == []
    assert target.leftovers() == []


def test_folder_of_a_live_run_is_not_cleaned(target: PathTarget, other_run: OtherRun) -> None:
    process, path = other_run(target.location)
    found = left_alone(target)
    assert (found.path, found.state) == (path, "live")
    assert f"pid {process.pid}" in found.detail
    assert target.leftovers() == []


def test_own_open_folder_is_live(target: PathTarget) -> None:
    work = target.open()
    assert left_alone(target).state == "live"
    work.close()


def test_dead_folder_goes_while_live_and_kept_ones_stay(target: PathTarget, other_run: OtherRun) -> None:
    work = target.open()
    kept = target.open().close(keep=True)
    dead = kill(other_run(target.location))
    result = clean(target.location)
    assert [found.path for found in result.removed] == [dead]
    assert {found.path: found.state for found in result.left} == {work.location: "live", kept: "kept"}
    work.close()


@pytest.mark.usefixtures("no_locks")
def test_without_locks_the_process_tells_who_lives(target: PathTarget, other_run: OtherRun) -> None:
    run = other_run(target.location)
    assert left_alone(target).state == "live"
    kill(run)
    assert only(find_leftovers(target.location)).state == "dead"


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_reused_pid_is_not_taken_for_the_run(target: PathTarget) -> None:
    plant(target, pid_start=1)
    assert only(clean(target.location).removed).state == "dead"


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_run_in_another_container_is_taken_as_live(target: PathTarget) -> None:
    plant(target, pid_namespace=1, pid_start=1)
    found = left_alone(target)
    assert (found.state, "another container" in found.detail) == ("live", True)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_restart_of_the_host_ended_the_run(target: PathTarget) -> None:
    plant(target, boot_id="before")
    assert "restarted" in only(clean(target.location).removed).detail


def test_folder_of_before_a_restart_is_dead(target: PathTarget) -> None:
    plant(target, boot_id="before")
    assert only(clean(target.location).removed).state == "dead"


def test_folder_of_another_host_is_never_judged_from_here(target: PathTarget) -> None:
    plant(target, boot_id="other", host="elsewhere")
    found = left_alone(target)
    assert found.state == "other-host"
    assert "'elsewhere'" in found.detail
    assert target.leftovers() == []


def test_container_that_came_back_under_another_name_knows_its_folder(target: PathTarget) -> None:
    plant(target, host="4f2a9c")
    assert only(target.leftovers()).state == "dead"


def test_host_without_a_boot_id_goes_by_its_name(target: PathTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markers, "_boot_id", lambda: "")
    plant(target, host="elsewhere")
    assert left_alone(target).state == "other-host"


def without_marker(folder: Path) -> None:
    (folder / MARKER).unlink()


def huge(folder: Path) -> None:
    os.truncate(folder / MARKER, 10 * 2**30)


def padded(folder: Path) -> None:
    with (folder / MARKER).open("ab") as file:
        file.write(b" " * 5000)


def binary(folder: Path) -> None:
    (folder / MARKER).write_bytes(os.urandom(300))


def empty(folder: Path) -> None:
    (folder / MARKER).write_bytes(b"")


def nested(folder: Path) -> None:
    (folder / MARKER).write_bytes(b"[" * 4000)


def another_format(folder: Path) -> None:
    content = (folder / MARKER).read_bytes()
    (folder / MARKER).write_bytes(content.replace(b'"format":1', b'"format":2'))


def link(folder: Path) -> None:
    (folder / MARKER).rename(folder / "real")
    (folder / MARKER).symlink_to("real")


def pipe(folder: Path) -> None:
    (folder / MARKER).unlink()
    os.mkfifo(folder / MARKER)


def a_folder(folder: Path) -> None:
    (folder / MARKER).unlink()
    (folder / MARKER).mkdir()


@pytest.mark.parametrize(
    "spoil",
    [without_marker, huge, padded, binary, empty, nested, another_format, link, pipe, a_folder],
    ids=lambda spoil: spoil.__name__,
)
def test_folder_without_a_valid_marker_stays(target: PathTarget, spoil: Callable[[Path], None]) -> None:
    folder = plant(target)
    spoil(folder)
    found = left_alone(target)
    assert (found.state, found.created) == ("unreadable-marker", None)
    assert found.detail
    assert (folder / "shard").read_bytes() == b"x" * 10


def test_copy_of_a_work_folder_stays(target: PathTarget) -> None:
    folder = plant(target)
    shutil.copytree(folder, Path(target.location, "pytest-ckpt-backup_1"))
    shutil.rmtree(folder)
    assert "another folder" in left_alone(target).detail


def test_folder_that_says_another_user_made_it_stays(target: PathTarget) -> None:
    plant(target, uid=os.geteuid() + 1)
    assert left_alone(target).state == "unreadable-marker"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")
@pytest.mark.parametrize("given", [".", MARKER])
def test_folder_or_marker_of_another_user_stays(target: PathTarget, given: str) -> None:
    os.chown(plant(target) / given, NOBODY, NOBODY)
    assert f"another user (uid {NOBODY})" in left_alone(target).detail


def test_other_names_links_and_files_are_not_even_listed(target: PathTarget, tmp_path: Path) -> None:
    elsewhere = plant(target).rename(tmp_path / "pytest-ckpt-abcd1234")
    Path(target.location, elsewhere.name).symlink_to(elsewhere)
    Path(target.location, "pytest-ckpt-abcd5678").write_text("a file")
    plant(target, "pytest-ckpt-too-long-1")
    plant(target, "my-pytest-ckpt-abcd1234")
    assert find_leftovers(target.location) == []
    assert clean(target.location, include_kept=True).removed == []
    assert (elsewhere / "shard").exists()
    assert len(os.listdir(target.location)) == 4


def test_link_that_takes_the_place_of_a_listed_folder_is_not_opened(target: PathTarget, tmp_path: Path) -> None:
    folder = plant(target)
    os.symlink(folder.rename(tmp_path / folder.name), folder)
    with pytest.raises(BadMarker, match="cannot be opened"):
        MarkedFolder.open(str(folder), writable=True)


def test_what_cannot_be_deleted_is_left_with_the_reason_and_the_next_is_cleaned(nobody: Path) -> None:
    target = PathTarget(TargetSpec("t", str(nobody)))
    stuck = plant(target) / "closed"
    (stuck / "inner").mkdir(parents=True)
    stuck.chmod(0o500)
    plant(target, "pytest-ckpt-zzzz1234")
    result = clean(target.location)
    assert [os.path.basename(found.path) for found in result.removed] == ["pytest-ckpt-zzzz1234"]
    assert "could not be removed" in only(result.left).detail
    assert str(stuck) in only(result.left).detail
    stuck.chmod(0o700)
    assert len(clean(target.location).removed) == 1


def test_link_inside_a_dead_folder_is_not_followed(target: PathTarget, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("mine")
    folder = plant(target)
    (folder / "link").symlink_to(tmp_path / "outside")
    assert len(clean(target.location).removed) == 1
    assert (tmp_path / "outside" / "file").read_text() == "mine"


def test_folder_that_another_clean_removed_meanwhile_is_no_error(target: PathTarget) -> None:
    folder = plant(target)
    first = MarkedFolder.open(str(folder), writable=True)
    second = MarkedFolder.open(str(folder), writable=True)
    assert first.judge(exclusive=True)[0] == "dead"
    assert second.judge(exclusive=True)[0] == "live"
    first.delete()
    second.delete()
    assert os.listdir(target.location) == []


def test_target_that_cannot_be_listed_is_refused(tmp_path: Path) -> None:
    for look in (find_leftovers, clean):
        with pytest.raises(SettingError, match="cannot be listed"):
            look(str(tmp_path / "none"))


def test_target_may_be_given_by_a_link(target: PathTarget, tmp_path: Path) -> None:
    folder = plant(target)
    (tmp_path / "link").symlink_to(target.location)
    assert only(find_leftovers(str(tmp_path / "link"))).path == str(folder)


def test_marker_tells_its_run_and_survives_the_round_trip(target: PathTarget) -> None:
    work = target.open()
    content = Path(work.location, MARKER).read_bytes()
    marker = msgspec.json.decode(content, type=Marker)
    assert len(content) == 1024
    assert (marker.format, marker.pid, marker.uid) == (1, os.getpid(), os.geteuid())
    assert (marker.host, marker.folder) == (os.uname().nodename, os.path.basename(work.location))
    assert (len(marker.token), marker.state) == (32, "running")
    work.close()
