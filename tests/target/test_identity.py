"""What a volume is: on made-up machines, on real mounts, and on garbage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_ckpt.target.identity import identify, is_root_filesystem
from pytest_ckpt.target.volume import VolumeIdentity
from tests.target.fuse import fuse_mount
from tests.target.machine import GB, SERIAL, Machine, write

INSTANCE_STORE = "Amazon EC2 NVMe Instance Storage"
EBS = "Amazon Elastic Block Store             "


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


def encoded(identity: VolumeIdentity) -> str:
    content = msgspec.json.encode(identity)
    assert msgspec.json.decode(content, type=VolumeIdentity) == identity
    return content.decode()


def test_instance_store_and_ebs_are_told_apart_by_their_models(machine: Machine) -> None:
    root = machine.partition("259:9", machine.nvme(0, EBS))
    machine.nvme(1, INSTANCE_STORE, size_bytes=900 * GB)
    machine.mount("/", "ext4", "259:9", f"/dev/{root.name}")
    machine.mount("/mnt/nvme", "xfs", "259:1", "/dev/nvme1n1", "rw,noquota")
    ebs, store = machine.identify("/opt/work"), machine.identify("/mnt/nvme/run")
    assert (ebs.storage_class, ebs.rule) == ("ebs", "NVMe model 'Amazon Elastic Block Store'")
    assert (store.storage_class, store.rule) == ("nvme-instance-store", f"NVMe model '{INSTANCE_STORE}'")
    assert [(layer.name, layer.kind, layer.below) for layer in ebs.layers] == [("nvme0n1p1", "partition", ["nvme0n1"])]
    assert (ebs.root_filesystem, store.root_filesystem) == (True, False)
    assert (store.medium, store.network, store.options) == ("storage", False, ["rw", "relatime", "noquota"])
    (disk,) = store.disks
    assert (disk.name, disk.transport, disk.rotational, disk.scheduler) == ("nvme1n1", "nvme", False, "none")
    assert (disk.size_bytes, disk.logical_block_bytes, disk.physical_block_bytes) == (900 * GB, 512, 4096)


@pytest.mark.parametrize(
    ("model", "storage_class"),
    [
        ("nvme_card-pd", "gcp-pd"),
        ("nvme_card", "gcp-local-ssd"),
        ("nvme_card12", "gcp-local-ssd"),
        ("MSFT NVMe Accelerator v1.0", "azure-disk"),
        ("Microsoft NVMe Direct Disk v2", "azure-local-nvme"),
        ("QEMU NVMe Ctrl", "virtual-disk"),
        ("SAMSUNG MZQL21T9HCJR-00A07", "nvme"),
        (None, "unknown"),
    ],
)
def test_class_of_an_nvme_disk_follows_its_model(machine: Machine, model: str | None, storage_class: str) -> None:
    machine.nvme(0, model)
    machine.mount("/d", "ext4", "259:0")
    assert machine.identify("/d").storage_class == storage_class


def test_nvme_over_a_network_is_no_local_nvme(machine: Machine) -> None:
    machine.nvme(0, "Linux", transport="tcp")
    machine.mount("/d", "ext4", "259:0")
    found = machine.identify("/d")
    assert (found.storage_class, found.disks[0].transport) == ("nvme-of", "nvme-tcp")


def test_nvme_disk_with_several_paths_has_the_transport_of_its_controllers(machine: Machine) -> None:
    files = {"device/nvme0/transport": "pcie", "device/nvme1/transport": "pcie"}
    machine.disk("259:0", "virtual/nvme-subsystem/nvme-subsys0/nvme0n1", "KIOXIA CM7", files=files)
    machine.mount("/d", "ext4", "259:0")
    assert machine.identify("/d").storage_class == "nvme"


def test_raid_of_eight_drives_has_their_count_and_class(machine: Machine) -> None:
    drives = [machine.nvme(index, INSTANCE_STORE) for index in range(8)]
    machine.raid("9:0", "md0", "raid0", drives)
    machine.mount("/mnt/array", "xfs", "9:0", "/dev/md0")
    found = machine.identify("/mnt/array")
    assert found.storage_class == "raid0-8x-nvme-instance-store"
    assert found.rule == f"raid0 of 8 members: NVMe model '{INSTANCE_STORE}'"
    assert (found.layers[0].kind, found.layers[0].level, found.layers[0].members) == ("raid", "raid0", 8)
    assert [disk.name for disk in found.disks] == [f"nvme{index}n1" for index in range(8)]
    assert found.device_model == INSTANCE_STORE


def test_raid_that_has_lost_a_member_is_of_another_class(machine: Machine) -> None:
    machine.raid("9:0", "md0", "raid1", [machine.nvme(0, "X")], members=2)
    machine.mount("/d", "xfs", "9:0")
    found = machine.identify("/d")
    assert (found.storage_class, found.rule) == ("raid1-1x-nvme", "raid1 of 1 of 2 members: NVMe model 'X'")


def test_raid_of_different_drives_is_mixed_and_one_with_an_unknown_drive_unknown(machine: Machine) -> None:
    ssd = machine.nvme(0, "X")
    machine.raid("9:0", "md0", "raid0", [ssd, machine.nvme(1, EBS)])
    machine.raid("9:1", "md1", "raid0", [ssd, machine.nvme(2, None)])
    machine.mount("/mixed", "xfs", "9:0")
    machine.mount("/unknown", "xfs", "9:1")
    mixed, unknown = machine.identify("/mixed"), machine.identify("/unknown")
    assert (mixed.storage_class, mixed.rule) == ("raid0-mixed", "raid0 of 2 members: 1 nvme and 1 ebs")
    assert (unknown.storage_class, unknown.rule) == ("unknown", "NVMe disk whose model /sys does not tell")


def test_logical_volume_on_one_drive_has_the_class_of_the_drive(machine: Machine) -> None:
    partition = machine.partition("259:9", machine.nvme(0, "X"))
    machine.mapped("253:0", "dm-0", [partition], uuid="LVM-")
    machine.mount("/d", "ext4", "253:0", "/dev/mapper/vg-data")
    found = machine.identify("/d")
    assert (found.storage_class, found.source) == ("nvme", "/dev/mapper/vg-data")
    assert [(layer.name, layer.kind) for layer in found.layers] == [("dm-0", "lvm"), ("nvme0n1p1", "partition")]


def test_logical_volume_over_drives_counts_drives_and_no_partitions(machine: Machine) -> None:
    first, second = machine.nvme(0, "X"), machine.nvme(1, "X")
    parts = [machine.partition("259:8", first), machine.partition("259:9", second)]
    machine.mapped("253:0", "dm-0", parts, uuid="LVM-")
    machine.mount("/d", "ext4", "253:0")
    again = machine.device("259:7", f"{first.relative_to(machine.sys / 'devices')}/nvme0n1p2", {"partition": "2"})
    machine.mapped("253:1", "dm-1", [parts[0], again], uuid="LVM-")
    machine.mount("/one", "ext4", "253:1")
    assert machine.identify("/d").storage_class == "lvm-2x-nvme"
    assert machine.identify("/one").storage_class == "nvme"


def test_encrypted_volume_on_a_raid_names_both(machine: Machine) -> None:
    array = machine.raid("9:0", "md0", "raid10", [machine.nvme(index, "X") for index in range(4)])
    machine.mapped("253:0", "dm-0", [array], uuid="CRYPT-LUKS2-")
    machine.mount("/d", "ext4", "253:0")
    found = machine.identify("/d")
    assert found.storage_class == "crypt-raid10-4x-nvme"
    assert found.rule.endswith("through dm-crypt")


def test_paths_to_one_disk_are_no_raid(machine: Machine) -> None:
    bus = "pci0000:00/0000:05:00.0/host1/port-1:0/end_device-1:0"
    paths = [
        machine.scsi(letter, f"8:{i}", f"{bus}/{letter}", "ACME", "R6", rotational=1) for i, letter in enumerate("ab")
    ]
    machine.mapped("253:0", "dm-0", paths, uuid="mpath-")
    machine.mount("/d", "xfs", "253:0")
    assert machine.identify("/d").storage_class == "multipath-hdd"


@pytest.mark.parametrize(
    ("bus", "vendor", "model", "rotational", "storage_class", "transport", "shown"),
    [
        ("ahci", "ATA", "Samsung SSD 870", 0, "sata-ssd", "sata", "Samsung SSD 870"),
        ("ahci", "ATA", "WDC WD40EFRX", 1, "hdd", "sata", "WDC WD40EFRX"),
        ("ahci", "ATA", "QEMU HARDDISK", 1, "virtual-disk", "sata", "QEMU HARDDISK"),
        ("pci0000:00/0000:01:00.0/host0/end_device-0:0", "HGST", "SS530", 0, "sas-ssd", "sas", "HGST SS530"),
        ("pci0000:00/usb1/1-1/host0", "SanDisk", "Ultra", 0, "usb", "usb", "SanDisk Ultra"),
        ("pci0000:00/virtio3/host0", "Google", "PersistentDisk", 0, "gcp-pd", "virtio-scsi", "Google PersistentDisk"),
        ("LNXSYSTM:00/VMBUS:00/a/host0", "Msft", "Virtual Disk", 1, "virtual-disk", "hyperv", "Msft Virtual Disk"),
        ("platform/host0/session1", "LIO-ORG", "disk", 0, "iscsi", "iscsi", "LIO-ORG disk"),
        # A RAID controller shows its own logical drives, and says of each that it rotates.
        ("pci0000:00/0000:01:00.0/host0", "DELL", "PERC H755", 1, "unknown", "unknown", "DELL PERC H755"),
    ],
)
def test_class_of_a_scsi_disk_follows_model_bus_and_rotation(
    machine: Machine, bus: str, vendor: str, model: str, rotational: int, storage_class: str, transport: str, shown: str
) -> None:
    machine.scsi("a", "8:0", machine.ahci() if bus == "ahci" else bus, vendor, model, rotational=rotational)
    machine.mount("/d", "ext4", "8:0", "/dev/sda")
    found = machine.identify("/d")
    (disk,) = found.disks
    assert (found.storage_class, disk.transport, disk.model) == (storage_class, transport, shown)
    assert shown in found.rule


def test_virtio_disk_is_no_hard_disk_though_it_says_that_it_rotates(machine: Machine) -> None:
    machine.disk("254:0", "pci0000:00/0000:00:02.0/virtio1/block/vda", None, rotational=1)
    machine.mount("/", "ext4", "254:0", "/dev/vda")
    assert (machine.identify("/x").storage_class, machine.identify("/x").rule) == ("virtio", "virtio disk")


@pytest.mark.parametrize(
    ("filesystem", "source", "storage_class"),
    [
        ("nfs", "server:/export", "nfs"),
        ("nfs4", "fs-1.efs.us-east-1.amazonaws.com:/", "nfs"),
        ("lustre", "10.0.0.1@tcp:/fsx", "lustre"),
        ("wekafs", "backend/default", "weka"),
        ("virtiofs", "share", "virtiofs"),
        ("fuse.s3fs", "s3fs", "fuse"),
        ("fuse", "mountpoint-s3", "fuse"),
    ],
)
def test_network_file_systems_are_network(machine: Machine, filesystem: str, source: str, storage_class: str) -> None:
    machine.mount("/", "ext4", "8:1")
    machine.mount("/shared", filesystem, "0:55", source)
    found = machine.identify("/shared/ckpt")
    assert (found.storage_class, found.network, found.medium) == (storage_class, True, "network")
    assert (found.source, found.disks, found.root_filesystem) == (source, [], False)


def test_fuse_program_that_nobody_knows_is_not_said_to_be_network_nor_local(machine: Machine) -> None:
    machine.mount("/f", "fuse.corpfs", "0:55", "corpfs")
    found = machine.identify("/f")
    assert (found.storage_class, found.network, found.medium) == ("fuse", None, "storage")
    assert found.rule == "a FUSE file system of type fuse.corpfs from 'corpfs'"


def test_root_of_a_container_is_the_root_file_system_and_its_disk_is_not_seen(machine: Machine) -> None:
    machine.nvme(0, "X")
    upper = "/var/lib/docker/overlay2/0123abcd-not-here/diff"
    machine.mount("/", "overlay", "0:50", "overlay", f"rw,lowerdir=/l/A:/l/B,upperdir={upper},workdir=/w")
    machine.mount("/etc/hosts", "ext4", "259:0", "/dev/nvme0n1", root="/var/lib/docker/containers/c/hosts")
    machine.mount("/data", "ext4", "259:0", "/dev/nvme0n1", root="/srv/data")
    found = machine.identify("/workspace")
    assert (found.storage_class, found.network, found.backing) == ("overlay", None, None)
    assert found.rule == "an overlay whose upper folder is not seen from here"
    assert machine.is_root_filesystem("/workspace") is True
    assert machine.is_root_filesystem("/data/ckpt") is False
    assert machine.identify("/data").storage_class == "nvme"


def test_overlay_whose_upper_folder_is_seen_has_the_facts_of_its_volume(machine: Machine, tmp_path: Path) -> None:
    machine.mount(tmp_path, "tmpfs", "0:30")
    machine.mount("/m", "overlay", "0:50", "overlay", f"rw,lowerdir=/l,upperdir={tmp_path},workdir=/w")
    found = machine.identify("/m")
    assert found.backing is not None
    assert (found.storage_class, found.medium, found.backing.mount) == ("overlay", "memory", str(tmp_path))


def test_overlay_whose_upper_folder_seems_to_lie_on_itself_has_no_known_volume(machine: Machine) -> None:
    machine.mount("/", "overlay", "0:50", "overlay", "rw,lowerdir=/l,upperdir=/usr,workdir=/w")
    assert machine.identify("/x").backing is None


def test_folder_of_the_root_file_system_that_is_mounted_again_lies_on_it(machine: Machine) -> None:
    machine.mount("/", "ext4", "8:1")
    machine.mount("/scratch", "ext4", "8:1", root="/srv/scratch")
    machine.mount("/mnt/nvme", "ext4", "259:0")
    answers = [machine.is_root_filesystem(path) for path in ("/mnt", "/scratch/run", "/mnt/nvme", "/mnt/nvme/deep/er")]
    assert answers == [True, True, False, False]


def test_whether_a_path_lies_on_the_root_is_denied_where_the_kernel_does_not_tell(tmp_path: Path) -> None:
    assert is_root_filesystem("/", proc=str(tmp_path)) is False
    found = identify("/", proc=str(tmp_path), sys=str(tmp_path))
    assert (found.storage_class, found.filesystem, found.root_filesystem) == ("unknown", "unknown", False)


def test_btrfs_is_found_by_its_source_since_its_number_is_its_own(machine: Machine) -> None:
    machine.partition("259:9", machine.nvme(0, "X"))
    machine.mount("/", "btrfs", "0:33", "/dev/nvme0n1p1", "rw,subvol=/@", root="/@")
    machine.mount("/home", "btrfs", "0:33", "/dev/nvme0n1p1", "rw,subvol=/@home", root="/@home")
    found = machine.identify("/home/me")
    assert (found.storage_class, found.device_number, found.root_filesystem) == ("nvme", "0:33", True)


def test_btrfs_over_several_drives_is_a_raid_by_the_profile_of_its_data(machine: Machine) -> None:
    for index in range(2):
        machine.nvme(index, "X")
        write(machine.sys / f"fs/btrfs/some-id/devices/nvme{index}n1", {})
    write(machine.sys / "fs/btrfs/some-id/allocation/data", {"flags": "1", "raid0/total_bytes": "1"})
    machine.mount("/d", "btrfs", "0:33", "/dev/nvme0n1")
    found = machine.identify("/d")
    assert (found.storage_class, len(found.disks)) == ("btrfs-raid0-2x-nvme", 2)
    write(machine.sys / "fs/btrfs/some-id/allocation/data", {"single/total_bytes": "1"})
    assert machine.identify("/d").rule == "/sys does not tell the RAID level of btrfs"


@pytest.mark.parametrize("source", ["/dev/mapper/my--vg-data", "/dev/my-vg/data"])
def test_mapped_device_is_found_by_either_name_of_its_source(machine: Machine, source: str) -> None:
    machine.mapped("253:0", "dm-0", [machine.nvme(0, "X")], uuid="LVM-", label="my--vg-data")
    machine.mount("/d", "btrfs", "0:33", source)
    assert machine.identify("/d").storage_class == "nvme"


def test_zfs_is_unknown_with_the_facts(machine: Machine) -> None:
    machine.mount("/tank", "zfs", "0:45", "tank/data")
    found = machine.identify("/tank")
    assert (found.storage_class, found.medium) == ("unknown", "storage")
    assert found.rule == "zfs on 'tank/data', device '0:45': /sys does not tell its disks"


def test_memory_that_is_mounted_under_the_name_of_a_disk_stays_memory(machine: Machine) -> None:
    machine.nvme(0, "X")
    machine.mount("/t", "tmpfs", "0:30", "/dev/nvme0n1")
    found = machine.identify("/t")
    assert (found.storage_class, found.medium, found.disks) == ("tmpfs", "memory", [])


def test_loop_device_on_a_file_in_memory_is_memory(machine: Machine, tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.touch()
    machine.mount(tmp_path, "tmpfs", "0:30")
    machine.disk("7:0", "virtual/block/loop0", None, files={"loop/backing_file": str(image)})
    machine.mount("/d", "ext4", "7:0", "/dev/loop0")
    found = machine.identify("/d")
    assert (found.storage_class, found.medium, found.disks[0].backing_file) == ("loop", "memory", str(image))
    assert found.disks[0].backing is not None
    assert found.disks[0].backing.mount == str(tmp_path)


def test_loop_device_that_lies_on_itself_ends(machine: Machine, tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.touch()
    for number in (0, 1):
        files = {"loop/backing_file": str(image)}
        machine.disk(f"7:{number}", f"virtual/block/loop{number}", None, files=files)
    machine.mount(tmp_path, "ext4", "7:0")
    machine.mount("/d", "ext4", "7:1")
    encoded(machine.identify("/d"))


def test_drives_missing_in_sys_make_the_class_unknown(machine: Machine) -> None:
    machine.mount("/a", "ext4", "259:3", "/dev/nvme0n1p1")
    machine.mount("/b", "ext4", "9:0", "/dev/md0")
    machine.mount("/c", "ext4", "253:0")
    machine.raid("9:0", "md0", "raid0", [])
    (machine.sys / "devices/gone/block/sda").mkdir(parents=True)
    machine.stacked("253:0", "dm-0", [machine.sys / "devices/gone/block/sda"], {"dm/uuid": "LVM-"})
    found = [machine.identify(path) for path in ("/a", "/b", "/c")]
    assert [one.storage_class for one in found] == ["unknown"] * 3
    assert [one.rule for one in found] == [
        "ext4 on '/dev/nvme0n1p1', device '259:3': /sys does not tell its disks",
        "/sys shows no disk below md0",
        "unknown disk; /sys does not tell whether it rotates",
    ]


def test_serial_numbers_are_in_no_identity(machine: Machine) -> None:
    array = machine.raid("9:0", "md0", "raid0", [machine.partition("259:9", machine.nvme(0, "X"))])
    machine.mapped("253:0", "dm-0", [array], uuid="mpath-", label=SERIAL)
    machine.mount("/d", "ext4", "253:0")
    found = encoded(machine.identify("/d"))
    assert '"nvme0n1"' in found
    assert SERIAL not in found


def test_credentials_in_sources_and_options_are_hidden(machine: Machine) -> None:
    machine.mount("/a", "fuse", "0:50", "curlftpfs#ftp://me:hunter2@host/", "rw,user_id=0")
    machine.mount("/b", "cifs", "0:51", "//server/share", "rw,username=me,password=hunter2")
    machine.mount("/c", "fuse.blobfuse2", "0:52", "https://host/container?sig=hunter2")
    found = [machine.identify(path) for path in ("/a", "/b", "/c")]
    assert "hunter2" not in "".join(encoded(one) for one in found)
    assert [one.source for one in found] == [
        "curlftpfs#ftp://<hidden>@host/",
        "//server/share",
        "https://host/container?<hidden>",
    ]


def test_undecodable_and_unprintable_names_can_be_stored(machine: Machine) -> None:
    (machine.proc / "self/mountinfo").write_bytes(b"1 0 0:9 / /d\xff\\012x rw - tmpfs t\x1b rw\n")
    assert '"mount":"/d\\\\xff\\\\nx"' in encoded(machine.identify(os.fsdecode(b"/d\xff\nx/y")))


SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # hundreds of files an example, on a busy disk
words = st.sampled_from(
    ["", "-", "1", "0:1", "/", "/mnt", "\\040", "\\777", "rw", "ext4", "btrfs", "overlay", "/dev/x:"]
)
lines = st.lists(words | st.text(max_size=5), max_size=12).map(" ".join)
contents = st.sampled_from(["", "\0", "1", "-1", "9" * 40, "[", "[x]", "raid0", "LVM-", "²"]) | st.text(max_size=9)


@settings(max_examples=40, deadline=None)
@given(st.lists(lines, max_size=4).map("\n".join) | st.text(max_size=40), st.binary(max_size=20))
def test_garbage_in_mountinfo_raises_nothing(text: str, tail: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=SCRATCH) as root:
        machine = Machine(Path(root))
        (machine.proc / "self/mountinfo").write_bytes(text.encode(errors="replace") + tail)
        encoded(machine.identify("/mnt/x"))
        machine.is_root_filesystem("/mnt/x")
        for found in machine.volumes():
            encoded(found)


FILES = [
    *("partition", "md/level", "md/raid_disks", "dm/uuid", "dm/name", "size", "loop/backing_file", "device/model"),
    *("device/vendor", "device/name", "device/transport", "queue/rotational", "queue/scheduler"),
]
NAMES = ["nvme0n1", "dm-0", "md0", "loop0", "sda"]
BUSES = ["virtual/block", "pci/ata1/host0/block", "pci/virtio1/block", "pci/mmc_host/block"]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(FILES), contents), max_size=12),
    st.sets(st.tuples(st.sampled_from(NAMES), st.sampled_from([*NAMES, "gone"]))),
    st.sampled_from(BUSES),
    st.sampled_from(["ext4", "btrfs", "fuseblk", "fuse.x", "overlay"]),
)
def test_garbage_in_sys_raises_nothing(
    files: list[tuple[str, str, str]], on: set[tuple[str, str]], bus: str, filesystem: str
) -> None:
    with tempfile.TemporaryDirectory(dir=SCRATCH) as root:
        machine = Machine(Path(root))
        for index, name in enumerate(NAMES):
            machine.device(f"8:{index}", f"{bus}/{name}")
            machine.mount(f"/{name}", filesystem, f"8:{index}", f"/dev/{name}")
        for name, file, content in files:
            write(machine.sys / f"devices/{bus}/{name}", {file: content.encode(errors="replace").decode()})
        for name, below in on:
            write(machine.sys / f"devices/{bus}/{name}/slaves/{below}", {})
        for name in NAMES:
            encoded(machine.identify(f"/{name}"))


@pytest.mark.parametrize("count", [3, 100])
def test_devices_stacked_without_end_are_unknown(machine: Machine, count: int) -> None:
    for index in range(count):
        below = [Path(f"dm-{(index + 1) % count}")]
        machine.stacked(f"253:{index}", f"dm-{index}", below, {"dm/uuid": "LVM-"})
    machine.mount("/d", "ext4", "253:0")
    found = machine.identify("/d")
    assert found.storage_class == "unknown"
    assert "/sys shows no end of what dm-" in found.rule


def test_more_devices_than_any_machine_has_are_not_followed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_ckpt.target.blockdevice._MOST_DEVICES", 4)
    machine.raid("9:0", "md0", "raid0", [machine.nvme(index, "X") for index in range(6)])
    machine.mount("/d", "ext4", "9:0")
    found = machine.identify("/d")
    assert (len(found.disks), found.storage_class, found.rule) == (3, "unknown", "/sys does not show nvme3n1")


def test_folders_and_pipes_in_place_of_files_are_not_waited_for(machine: Machine) -> None:
    drive = machine.nvme(0, None)
    os.mkfifo(drive / "device/model")
    (drive / "device/vendor").mkdir()
    machine.mount("/d", "ext4", "259:0")
    assert machine.identify("/d").disks[0].model is None


# Real mounts.


def test_tmpfs_is_identified(mounted: Callable[..., Path]) -> None:
    point = mounted("tmpfs", "none", "size=1m")
    found = identify(str(point / "not" / "there"))
    assert (found.mount, found.storage_class, found.medium) == (str(point), "tmpfs", "memory")
    assert "size=1024k" in found.options
    assert is_root_filesystem(str(point)) is False


def test_ext4_on_a_loop_device_is_identified_as_lsblk_and_findmnt_show_it(ext4: Path) -> None:
    found = identify(str(ext4))
    (disk,) = found.disks
    assert (found.storage_class, found.filesystem, found.layers) == ("loop", "ext4", [])
    assert disk.backing_file == str(ext4.parent / "image")
    assert disk.backing == identify(str(ext4.parent))
    assert found.medium == disk.backing.medium
    assert findmnt(ext4) == {
        "maj:min": found.device_number,
        "source": found.source,
        "fstype": "ext4",
        "target": found.mount,
        "options": ",".join(found.options),
    }
    assert lsblk(found.source) == {
        "kname": disk.name,
        "rota": disk.rotational,
        "sched": disk.scheduler,
        "size": disk.size_bytes,
        "log-sec": disk.logical_block_bytes,
        "phy-sec": disk.physical_block_bytes,
        "model": disk.model,
    }


def test_every_mounted_block_device_of_this_machine_is_described_as_lsblk_does(tmp_path: Path) -> None:
    found = identify(str(tmp_path))
    if not found.disks:
        pytest.skip(f"{found.rule}")
    for disk in found.disks:
        shown = lsblk(f"/dev/{disk.name}")
        assert (shown["size"], shown["rota"], shown["sched"]) == (disk.size_bytes, disk.rotational, disk.scheduler)


def test_fuse_mount_that_looks_like_nfs_is_identified_and_not_taken_for_it(tmp_path: Path) -> None:
    point = tmp_path / "shared"
    point.mkdir()
    try:
        with fuse_mount(point, "fuse.corpnfs", "server:/export", 2 * GB):
            found = identify(str(point / "run"))
            root = is_root_filesystem(str(point))
    except OSError as error:
        pytest.skip(f"FUSE cannot be mounted here: {error}")
    assert (found.mount, found.filesystem, found.source) == (str(point), "fuse.corpnfs", "server:/export")
    assert (found.storage_class, found.network, root) == ("fuse", None, False)


def test_overlay_is_identified_down_to_the_volume_it_writes_to(
    mounted: Callable[..., Path], ext4: Path, tmp_path: Path
) -> None:
    for folder in ("upper", "work"):
        (ext4 / folder).mkdir()
    (tmp_path / "lower").mkdir()
    options = f"lowerdir={tmp_path}/lower,upperdir={ext4}/upper,workdir={ext4}/work"
    found = identify(str(mounted("overlay", "overlay", options, name="merged")))
    assert (found.storage_class, found.filesystem, found.root_filesystem) == ("overlay", "overlay", False)
    assert found.backing == identify(str(ext4))


def test_folder_mounted_once_more_is_the_same_volume(ext4: Path, tmp_path: Path) -> None:
    (ext4 / "deep").mkdir()
    bind = tmp_path / "bind"
    bind.mkdir()
    subprocess.run(["mount", "--bind", str(ext4 / "deep"), str(bind)], check=True, timeout=5)
    try:
        found = identify(str(bind))
        assert (found.mount, found.device_number) == (str(bind), identify(str(ext4)).device_number)
    finally:
        subprocess.run(["umount", str(bind)], check=True, timeout=5)


def findmnt(point: Path) -> dict[str, str]:
    require("findmnt")
    command = ["findmnt", "-J", "-o", "MAJ:MIN,SOURCE,FSTYPE,TARGET,OPTIONS", str(point)]
    (shown,) = json.loads(subprocess.check_output(command, timeout=5))["filesystems"]
    assert isinstance(shown, dict)
    return shown


def lsblk(device: str) -> dict[str, object]:
    require("lsblk")
    wanted = ["kname", "rota", "sched", "size", "log-sec", "phy-sec", "model"]
    command = ["lsblk", "-J", "-O", "-b", "-d", device]
    (shown,) = json.loads(subprocess.check_output(command, timeout=5))["blockdevices"]
    return {name: int(shown[name]) if name == "size" else shown[name] for name in wanted}


def require(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
