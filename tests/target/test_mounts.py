"""Which mount holds a path."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_ckpt.target.mounts import Mount, find_mount, mount_of, parse_mountinfo
from pytest_ckpt.target.path import PathTarget
from pytest_ckpt.target.spec import TargetSpec

TEXT = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:20 / /mnt/my\040disk rw master:2 propagate_from:3 - xfs /dev/sda rw
31 22 0:21 / /mnt rw - tmpfs none rw
40 22 0:22 / /data rw - autofs systemd-1 rw
41 40 0:23 / /data rw - nfs4 server:/x rw
"""


@pytest.mark.parametrize(
    ("path", "point", "filesystem"),
    [
        ("/mnt/my disk/a", "/mnt/my disk", "xfs"),
        ("/mnt/my disks", "/mnt", "tmpfs"),
        ("/data", "/data", "nfs4"),
        ("/home", "/", "ext4"),
        ("/", "/", "ext4"),
    ],
)
def test_deepest_containing_mount_is_found_and_the_last_of_equals(path: str, point: str, filesystem: str) -> None:
    found = find_mount(path, parse_mountinfo(TEXT))
    assert (found.point, found.filesystem) == (point, filesystem)


def test_kernels_own_mount_id_decides_over_the_spelling() -> None:
    assert find_mount("/mnt/my disk/a", parse_mountinfo(TEXT), mount_id=31).filesystem == "tmpfs"


def test_path_without_any_listed_mount_is_unknown_and_no_error() -> None:
    assert find_mount("/x", []) == Mount(-1, "/", "unknown")


def test_path_that_is_missing_belongs_to_the_mount_of_its_nearest_folder(tmp_path: Path) -> None:
    assert mount_of(str(tmp_path / "a" / "b")) == mount_of(str(tmp_path))


def test_mount_that_lies_hidden_below_a_later_one_is_not_reported(mounted: Callable[..., Path]) -> None:
    point = mounted("tmpfs", "none", "size=1m")
    (point / "inner").mkdir()
    inner = mounted("ramfs", "none", name="mount point/inner")
    mounted("tmpfs", "none", "size=1m")
    try:
        inner.mkdir()
        assert mount_of(str(inner)).filesystem == "tmpfs"
    finally:
        os.rmdir(inner)


def test_tmpfs_is_memory_and_its_mount_point_with_a_blank_is_told(mounted: Callable[..., Path]) -> None:
    point = mounted("tmpfs", "none", "size=1m")
    target = PathTarget(TargetSpec("t", str(point)))
    assert (target.filesystem, target.medium, target.mount) == ("tmpfs", "memory", str(point))
    assert 0 < target.free_bytes() <= 2**20


def test_memory_file_system_without_a_limit_has_the_available_memory_free(
    mounted: Callable[..., Path],
) -> None:
    assert PathTarget(TargetSpec("t", str(mounted("ramfs", "none")))).free_bytes() > 2**20


def test_ext4_is_storage(ext4: Path) -> None:
    (ext4 / "deep").mkdir()
    target = PathTarget(TargetSpec("t", str(ext4 / "deep")))
    assert (target.filesystem, target.medium, target.mount) == ("ext4", "storage", str(ext4))
    assert 2**20 < target.free_bytes() < 16 * 2**20
