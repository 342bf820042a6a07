"""Which other volumes of a machine could take checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import pytest_ckpt.target.volumes as module
from pytest_ckpt.target.identity import identify
from pytest_ckpt.target.volumes import volumes
from tests.target.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        (tmp_path / name).mkdir(parents=True)
        return tmp_path / name

    return make


def points(machine: Machine, **arguments: object) -> list[str]:
    return [os.path.basename(found.mount) for found in machine.volumes(**arguments)]  # type: ignore[arg-type]


def test_unused_array_is_listed_beside_the_slow_disk_that_is_used(
    machine: Machine, folder: Callable[[str], Path]
) -> None:
    work = folder("work")
    machine.nvme(0, "Amazon Elastic Block Store")
    machine.raid("9:0", "md0", "raid0", [machine.nvme(i, "Amazon EC2 NVMe Instance Storage") for i in range(1, 9)])
    machine.mount(work, "ext4", "259:0", "/dev/nvme0n1")
    machine.mount(folder("array"), "xfs", "9:0", "/dev/md0")
    (found,) = machine.volumes(beside=work / "deep" / "down")
    assert (os.path.basename(found.mount), found.storage_class) == ("array", "raid0-8x-nvme-instance-store")
    assert points(machine) == ["array", "work"]


@pytest.mark.parametrize(
    ("filesystem", "device"),
    [
        *(("proc", "0:5"), ("sysfs", "0:5"), ("cgroup2", "0:5"), ("autofs", "0:5"), ("fuse.lxcfs", "0:5")),
        *(("hugetlbfs", "0:5"), ("nsfs", "0:5"), ("vfat", "259:3"), ("unheard-of", "0:5")),
    ],
)
def test_file_systems_that_are_not_for_data_are_left_out(
    machine: Machine, folder: Callable[[str], Path], filesystem: str, device: str
) -> None:
    machine.mount(folder("a"), filesystem, device)
    assert points(machine) == []


@pytest.mark.parametrize(
    ("filesystem", "device"),
    [
        *(("ext4", "8:1"), ("btrfs", "0:5"), ("zfs", "0:5"), ("tmpfs", "0:5"), ("nfs4", "0:5"), ("lustre", "0:5")),
        *(("fuse.s3fs", "0:5"), ("fuse", "0:5"), ("overlay", "0:5")),
    ],
)
def test_file_systems_for_data_are_listed(
    machine: Machine, folder: Callable[[str], Path], filesystem: str, device: str
) -> None:
    machine.mount(folder("a"), filesystem, device)
    assert points(machine) == ["a"]


def test_read_only_mounts_are_left_out_whichever_level_says_so(machine: Machine, folder: Callable[[str], Path]) -> None:
    machine.mount(folder("a"), "ext4", "8:1", options="ro,errors=remount-ro")
    machine.mount(folder("b"), "ext4", "8:2", options="rw,errors=remount-ro")
    assert points(machine) == ["b"]


def test_device_mounted_several_times_is_listed_once_and_as_a_whole(
    machine: Machine, folder: Callable[[str], Path]
) -> None:
    machine.mount(folder("a"), "ext4", "8:1", root="/srv/a")
    machine.mount(folder("the-whole"), "ext4", "8:1")
    machine.mount(folder("b"), "ext4", "8:1", root="/srv/b")
    assert points(machine) == ["the-whole"]


def test_files_that_a_container_has_mounted_are_no_volumes(
    machine: Machine, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    hosts.touch()
    machine.mount(hosts, "ext4", "8:1", root="/c/hosts")
    assert points(machine) == []
    machine.mount(folder("volume"), "ext4", "8:1", root="/srv/volume")
    assert points(machine) == ["volume"]


def test_what_is_used_is_left_out_under_its_other_mount_points_too(
    machine: Machine, folder: Callable[[str], Path]
) -> None:
    used = folder("used")
    machine.mount(used, "ext4", "8:1", root="/srv")
    machine.mount(folder("whole"), "ext4", "8:1")
    assert points(machine, beside=used) == []


def test_covered_mounts_are_left_out(machine: Machine, folder: Callable[[str], Path]) -> None:
    point = folder("a")
    machine.mount(point, "ext4", "8:1")
    machine.mount(point, "xfs", "8:2")
    assert [found.filesystem for found in machine.volumes()] == ["xfs"]


def test_overlay_is_left_out_where_the_volume_it_writes_to_is_seen(
    machine: Machine, folder: Callable[[str], Path]
) -> None:
    disk = folder("disk")
    upper = folder("disk/upper")
    machine.mount(disk, "ext4", "8:1")
    machine.mount(folder("merged"), "overlay", "0:50", "overlay", f"rw,lowerdir=/l,upperdir={upper},workdir=/w")
    assert points(machine) == ["disk"]


def test_volumes_with_too_little_space_are_left_out(machine: Machine, folder: Callable[[str], Path]) -> None:
    point = folder("a")
    machine.mount(point, "ext4", "8:1")
    found = os.statvfs(point)
    assert points(machine, least_bytes=found.f_bavail * found.f_frsize // 2) == ["a"]
    assert points(machine, least_bytes=2**62) == []


def test_volume_that_never_answers_is_left_out_and_the_others_are_listed(
    machine: Machine, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = folder("dead")
    machine.mount(dead, "nfs4", "0:50", "gone:/export")
    machine.mount(folder("b"), "ext4", "8:2")
    real = os.path.isdir
    monkeypatch.setattr(module, "_ANSWER_S", 0.2)
    monkeypatch.setattr("os.path.isdir", lambda path: time.sleep(1) if path == str(dead) else real(path))
    assert points(machine) == ["b"]


def test_machine_that_tells_nothing_has_no_volumes(tmp_path: Path) -> None:
    assert volumes(proc=str(tmp_path), sys=str(tmp_path)) == []


def test_real_volumes_are_listed_and_the_used_one_left_out(
    mounted: Callable[..., Path], ext4: Path, tmp_path: Path
) -> None:
    memory = mounted("tmpfs", "none", "size=8m", name="memory")
    read_only = mounted("tmpfs", "none", "size=8m,ro", name="read only")
    listed = {found.mount: found for found in volumes(beside=str(tmp_path), least_bytes=2**20)}
    assert listed[str(ext4)] == identify(str(ext4))
    assert listed[str(memory)].medium == "memory"
    assert str(read_only) not in listed
    assert identify(str(tmp_path)).mount not in listed
    assert not {"/proc", "/sys", "/dev", "/dev/pts"} & set(listed)
    assert str(memory) not in {found.mount for found in volumes(least_bytes=2**24)}


def test_mount_hidden_below_another_is_not_listed(mounted: Callable[..., Path]) -> None:
    point = mounted("tmpfs", "none", "size=8m")
    (point / "inner").mkdir()
    inner = mounted("tmpfs", "none", "size=8m", name="mount point/inner")
    mounted("tmpfs", "none", "size=8m")
    try:
        inner.mkdir()
        assert str(inner) not in {found.mount for found in volumes()}
    finally:
        os.rmdir(inner)
