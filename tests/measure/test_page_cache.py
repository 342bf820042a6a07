"""Cold is cold: after dropping them, no page of a checkpoint's files is in memory."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pytest_ckpt.measure import page_cache

needs_fincore = pytest.mark.skipif(shutil.which("fincore") is None, reason="util-linux's fincore is not installed")


def cached_bytes(path: Path) -> int:
    printed = subprocess.run(
        ["fincore", "--bytes", "--noheadings", "--output=RES", str(path)],
        capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    return int(printed.stdout)


@needs_fincore
def test_files_of_a_folder_that_were_just_written_leave_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    dropped, other = tmp_path / "below" / "dirty", tmp_path / "beside"
    (tmp_path / "below" / "empty").touch()
    for path in (dropped, other):
        path.write_bytes(os.urandom(4 << 20))
    if cached_bytes(dropped) == 0:
        pytest.skip("this file system does not cache what is written")
    page_cache.drop_files(str(tmp_path / "below"))
    assert cached_bytes(dropped) == 0
    assert cached_bytes(other) >= 4 << 20, "others stay"


def test_page_cache_of_the_host_is_dropped_by_one_word_to_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "drop_caches"
    monkeypatch.setattr(page_cache, "DROP", told)
    assert page_cache.drop_everything() is None
    assert told.read_text() == "1\n", "clean pages alone: 3 would take the kernel's own caches too"


@pytest.mark.parametrize(
    ("number", "uid", "why"),
    [
        (errno.EACCES, 1000, "not root"),
        (errno.EPERM, 0, "not permitted here"),
        (errno.EROFS, 0, "/proc/sys/vm/drop_caches: Read-only file system"),
    ],
)
def test_why_it_is_not_dropped_is_told(monkeypatch: pytest.MonkeyPatch, number: int, uid: int, why: str) -> None:
    def refuse(path: Path, text: str) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert page_cache.drop_everything() == why
