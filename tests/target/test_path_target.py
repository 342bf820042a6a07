"""What a folder must be to serve as a target, and what is said about it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_ckpt.errors import CannotFit, SettingError
from pytest_ckpt.target.interface import Target
from pytest_ckpt.target.path import PathTarget, open_target
from pytest_ckpt.target.space import require_space, tree_bytes
from pytest_ckpt.target.spec import TargetSpec, parse_target

from .conftest import NOBODY

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


def at(path: Path) -> PathTarget:
    return PathTarget(parse_target(f"t={path}", "--ckpt-target"))


def refusal(target: PathTarget) -> str:
    """Return the one sentence with which checking and opening refuse, nothing having been written."""
    with pytest.raises(SettingError) as checked:
        target.check()
    with pytest.raises(SettingError) as opened:
        target.open()
    assert str(opened.value) == str(checked.value)
    assert "(from --ckpt-target)" in str(checked.value)
    assert "; write " in str(checked.value)
    return str(checked.value)


def test_ordinary_folder_is_accepted_without_a_warning(nobody: Path) -> None:
    target: Target = open_target(TargetSpec("disk", str(nobody)))
    assert target.check() == []
    assert (target.label, target.kind, target.location, target.given) == (
        "disk",
        "path",
        str(nobody),
        str(nobody),
    )
    assert os.listdir(nobody) == []


def test_missing_folder_is_refused_and_not_made(tmp_path: Path) -> None:
    assert "No such file" in refusal(at(tmp_path / "none"))
    assert os.listdir(tmp_path) == []


def test_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "not a folder" in refusal(at(tmp_path / "file"))


def test_dangling_link_is_refused_with_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert f"links to {tmp_path / 'gone'}" in refusal(at(tmp_path / "link"))


def test_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    refusal(at(tmp_path / "loop"))


@as_root
@pytest.mark.parametrize("given", ["link", "link/", "mine", "./mine/."])
def test_link_that_another_user_planted_is_refused(tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    os.lchown(tmp_path / "link", NOBODY, NOBODY)
    (tmp_path / "mine").symlink_to("link")
    monkeypatch.chdir(tmp_path)
    assert f"belongs to another user (uid {NOBODY})" in refusal(at(Path(given)))


@as_root
def test_foreign_link_is_not_hidden_by_a_trailing_slash_or_dot(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    os.lchown(tmp_path / "link", NOBODY, NOBODY)
    for ending in ("/", "/.", "//", "/./"):
        target = PathTarget(parse_target(f"t={tmp_path}/link{ending}", "--ckpt-target"))
        assert "belongs to another user" in refusal(target), ending


def test_link_of_root_is_followed_for_everyone(nobody: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can make a link of root")
    os.seteuid(0)
    (nobody / "link").symlink_to(nobody)
    os.seteuid(NOBODY)
    assert at(nobody / "link").check() == [f"{nobody / 'link'} links to {nobody}, which is used."]


def test_target_is_resolved_once_and_a_changed_link_changes_nothing(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    link = tmp_path / "link"
    link.symlink_to("first")
    target = at(link)
    link.unlink()
    link.symlink_to("second")
    assert f"{link} links to {tmp_path / 'first'}, which is used." in target.check()
    work = target.open()
    assert Path(work.location).parent == tmp_path / "first"
    work.close()


def test_target_that_became_a_link_after_it_was_resolved_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    target = at(tmp_path / "target")
    (tmp_path / "target").rename(tmp_path / "moved")
    (tmp_path / "target").symlink_to("moved")
    assert "has become a link" in refusal(target)


def test_folder_that_this_user_may_not_write_is_refused(nobody: Path) -> None:
    nobody.chmod(0o555)
    assert f"uid {os.geteuid()} may not write there" in refusal(at(nobody))
    nobody.chmod(0o755)


def test_read_only_file_system_is_refused(ext4: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(ext4)], check=True, timeout=5)
    assert "mounted read-only" in refusal(at(ext4))


def test_world_writable_folder_is_warned_of_unless_sticky(nobody: Path) -> None:
    nobody.chmod(0o777)
    assert "without the sticky bit" in at(nobody).check()[0]
    nobody.chmod(0o1777)
    assert at(nobody).check() == []


def test_running_as_root_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert [text for text in at(tmp_path).check() if text.startswith("Running as root")]


def test_root_on_nfs_is_warned_of_and_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = at(tmp_path)
    target.filesystem = "nfs4"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert [text for text in target.check() if "squashed" in text]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert not [text for text in target.check() if "squashed" in text]


def test_too_little_space_is_said_with_both_figures() -> None:
    require_space(10, 10, "/mnt/nvme")
    with pytest.raises(CannotFit, match=r"needs 96\.4 GB and /mnt/nvme has 12\.0 GB free"):
        require_space(96_363_134_976, 12_000_000_000, "/mnt/nvme")


def test_tree_bytes_equal_what_du_counts_for_the_files(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "shard").write_bytes(b"x" * 5000)
    os.truncate(tmp_path / "deep" / "shard", 1_000_000)
    os.link(tmp_path / "deep" / "shard", tmp_path / "again")
    (tmp_path / "empty").touch()
    folders = [str(tmp_path), str(tmp_path / "deep")]
    du = subprocess.run(["du", "-sb", "--apparent-size", str(tmp_path)], capture_output=True, check=True, timeout=5)
    assert tree_bytes(str(tmp_path)) == 1_000_000
    # Whether du counts the folders themselves differs between its versions.
    folders_bytes = sum(os.stat(folder).st_size for folder in folders)
    assert int(du.stdout.split()[0]) - tree_bytes(str(tmp_path)) in (0, folders_bytes)


def test_tree_bytes_follow_no_link_and_refuse_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/usr")
    assert tree_bytes(str(tmp_path)) == 0
    assert tree_bytes(str(tmp_path / "link")) == 0
    with pytest.raises(FileNotFoundError):
        tree_bytes(str(tmp_path / "gone"))


def test_tree_bytes_do_not_pass_over_a_folder_that_cannot_be_read(nobody: Path) -> None:
    (nobody / "closed").mkdir(mode=0)
    with pytest.raises(PermissionError):
        tree_bytes(str(nobody))
    (nobody / "closed").chmod(0o700)


def test_no_torch_and_no_pytest_is_imported() -> None:
    code = "import sys, pytest_ckpt.target.path; print([m for m in ('torch', 'pytest') if m in sys.modules])"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        capture_output=True,
        text=True,
        timeout=8,
        check=True,
    )
    assert done.stdout.strip() == "[]"
