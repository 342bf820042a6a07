"""The hardware id: what decides the speed, readable, safe as the name of a folder, and nothing that is private."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_ckpt.errors import SettingError
from pytest_ckpt.judge.hardware_differences import hardware_differences
from pytest_ckpt.measure.hardware_id import LONGEST, check_id, hardware_id, id_rule
from pytest_ckpt.records import Accelerators, Hardware

H100 = Accelerators(
    name="NVIDIA H100 80GB HBM3", count=8, memory_bytes=85_520_809_984, pcie_generation=5, pcie_width=16
)
VIRTIO = ("virtio", "ext4", "storage")


def hardware(cpu: str = "AMD EPYC", cpus: int = 2, **facts: Any) -> Hardware:
    return Hardware(**{"cpu": cpu, "cpus": cpus, "usable_cpus": cpus, "memory_bytes": 64 * 10**9, **facts})


DELL = hardware("Intel(R) Xeon(R) Platinum 8480+", 224, board="Dell Inc. PowerEdge XE9680", accelerators=[H100])
P5 = hardware("AMD EPYC 7R13 Processor", 192, instance_type="p5.48xlarge", accelerators=[H100])


@pytest.mark.parametrize(
    ("machine", "storage", "expected"),
    [
        (hardware(), VIRTIO, "amd-epyc-2cpu-virtio-ext4"),
        (
            P5,
            ("raid0-8x-nvme-instance-store", "xfs", "storage"),
            "p5.48xlarge-8xh100-80gb-hbm3-pcie5x16-raid0-8x-nvme-instance-store-xfs",
        ),
        (
            DELL,
            ("raid0-8x-nvme", "xfs", "storage"),
            "dell-poweredge-xe9680-intel-xeon-platinum-8480plus-224cpu-8xh100-80gb-hbm3-pcie5x16-raid0-8x-nvme-xfs",
        ),
        (
            hardware("Intel(R) Xeon(R) CPU @ 2.20GHz", 8, board="Google Compute Engine"),
            ("gcp-pd", "ext4", "storage"),
            "gce-intel-xeon-2.20ghz-8cpu-gcp-pd-ext4",
        ),
        (
            hardware(board="QEMU Standard PC (i440FX + PIIX, 1996)"),
            VIRTIO,
            "qemu-i440fx-amd-epyc-2cpu-virtio-ext4",
        ),
        (hardware("ARM Neoverse-V2", 72), ("unknown", "ext4", "storage"), "arm-neoverse-v2-72cpu-unknown-ext4"),
    ],
)
def test_id_of_a_machine_can_be_read(machine: Hardware, storage: tuple[str, str, str], expected: str) -> None:
    assert hardware_id(machine, *storage) == expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Intel(R) Xeon(R) Platinum 8259CL CPU @ 2.50GHz", "intel-xeon-platinum-8259cl"),
        ("Intel(R) Xeon(R) CPU E5-2686 v4 @ 2.30GHz", "intel-xeon-e5-2686-v4"),
        ("Intel(R) Xeon(R) CPU @ 2.80GHz", "intel-xeon-2.80ghz"),
        ("13th Gen Intel(R) Core(TM) i9-13900K", "13th-gen-intel-core-i9-13900k"),
        ("AMD EPYC 9654 96-Core Processor", "amd-epyc-9654"),
        ("AMD Ryzen 7 5800U with Radeon Graphics", "amd-ryzen-7-5800u"),
        ("AMD Ryzen AI 9 HX 370 w/ Radeon 890M", "amd-ryzen-ai-9-hx-370"),
        ("AMD Ryzen Threadripper PRO 5995WX 64-Cores", "amd-ryzen-threadripper-pro-5995wx"),
        ("AMD FX(tm)-8350 Eight-Core Processor", "amd-fx-8350"),
        ("Intel Xeon Processor (Skylake, IBRS)", "intel-xeon-skylake-ibrs"),
        ("QEMU Virtual CPU version 2.5+", "qemu-virtual-version-2.5plus"),
    ],
)
def test_cpu_is_named_without_marks_and_clocks(model: str, expected: str) -> None:
    assert hardware_id(hardware(model), *VIRTIO) == f"{expected}-2cpu-virtio-ext4"


@pytest.mark.parametrize(
    ("board", "expected"),
    [
        ("VMware7,1", "vmware"),
        ("VMware Virtual Platform", "vmware"),
        ("Xen HVM domU", "xen"),
        ("Microsoft Corporation Virtual Machine", "hyperv"),
        ("QEMU KVM Virtual Machine", "kvm"),
        ("QEMU Standard PC (Q35 + ICH9, 2009)", "qemu-q35"),
        ("Lenovo ThinkSystem SR675 V3 -[7D9RCTO1WW]-", "lenovo-thinksystem-sr675-v3"),
        ("Micro-Star International Co., Ltd. MS-7D70", "micro-star-international-ms-7d70"),
    ],
)
def test_board_is_named_shortly(board: str, expected: str) -> None:
    assert hardware_id(hardware(board=board), *VIRTIO) == f"{expected}-amd-epyc-2cpu-virtio-ext4"


@pytest.mark.parametrize(
    ("storage", "expected"),
    [
        (("tmpfs", "tmpfs", "memory"), "tmpfs"),
        (("nfs", "nfs", "network"), "nfs"),
        (("nfs", "nfs4", "network"), "nfs4"),
        (("cifs", "smb3", "network"), "cifs-smb3"),
        (("weka", "wekafs", "network"), "wekafs"),
        (("fuse", "fuse.s3fs", "network"), "fuse.s3fs"),
        (("fuse", "fuseblk", "storage"), "fuseblk"),
        (("overlay", "overlay", "storage"), "overlay"),
        (("overlay", "overlay", "memory"), "overlay-memory"),
        (("overlay", "overlay", "network"), "overlay-network"),
        (("loop", "ext4", "memory"), "loop-ext4-memory"),
        (("raid0-2x-zram", "ext4", "memory"), "raid0-2x-zram-ext4"),
        (("unknown", "unknown", "storage"), "unknown"),
        (("crypt-nvme", "btrfs", "storage"), "crypt-nvme-btrfs"),
    ],
)
def test_storage_is_named_once_and_memory_is_seen(storage: tuple[str, str, str], expected: str) -> None:
    assert hardware_id(hardware(), *storage) == f"amd-epyc-2cpu-{expected}"


def test_what_decides_the_speed_changes_the_id() -> None:
    replace = msgspec.structs.replace
    seven = replace(H100, count=7)
    narrow = replace(H100, pcie_width=8)
    ids = [
        *(hardware_id(one, *VIRTIO) for one in (DELL, P5, replace(DELL, cpus=112), replace(DELL, board=None))),
        *(
            hardware_id(replace(DELL, accelerators=groups), *VIRTIO)
            for groups in ([], [seven], [narrow], [H100, seven])
        ),
        hardware_id(DELL, "nvme", "ext4", "storage"),
        hardware_id(DELL, "virtio", "xfs", "storage"),
    ]
    assert len(set(ids)) == len(ids)


def test_what_a_container_or_a_kernel_changes_does_not_change_the_id() -> None:
    smaller = msgspec.structs.replace(DELL, usable_cpus=4, memory_bytes=10**9)
    assert hardware_id(smaller, *VIRTIO) == hardware_id(DELL, *VIRTIO)


def test_link_that_is_not_told_is_left_out() -> None:
    vgpu = Accelerators(name="NVIDIA A40-8Q", count=1)
    assert hardware_id(hardware(accelerators=[vgpu]), *VIRTIO) == "amd-epyc-2cpu-1xa40-8q-virtio-ext4"


def test_rule_explains_every_part_of_the_id() -> None:
    rule = id_rule(DELL, *VIRTIO)
    assert "-".join(part for part, _ in rule) == hardware_id(DELL, *VIRTIO)
    assert [facts for _, facts in rule] == [
        "board Dell Inc. PowerEdge XE9680; CPU Intel(R) Xeon(R) Platinum 8480+, 224 of them online",
        "8 x NVIDIA H100 80GB HBM3, PCIe 5 x16 at most",
        "storage class virtio, file system ext4, medium storage",
    ]


def test_long_id_keeps_accelerators_and_storage_and_stays_apart_from_others() -> None:
    storage = ("raid0-16x-nvme-instance-store", "xfs", "storage")
    boards = [f"Dell Inc. PowerEdge {'Very Long Name ' * 8}{last}" for last in "AB"]
    first, second = (hardware_id(msgspec.structs.replace(DELL, board=board), *storage) for board in boards)
    assert first != second
    for chosen in (first, second):
        assert len(chosen) <= LONGEST
        assert chosen.startswith("dell-poweredge-very-long-name-")
        assert chosen.endswith("-8xh100-80gb-hbm3-pcie5x16-raid0-16x-nvme-instance-store-xfs")


NAMES = st.text(max_size=200)
COUNTS = st.integers(min_value=0, max_value=10**6)
OPTIONAL = st.none() | COUNTS
GROUPS = st.builds(
    Accelerators, name=NAMES, count=COUNTS, memory_bytes=OPTIONAL, pcie_generation=OPTIONAL, pcie_width=OPTIONAL
)
MACHINES = st.builds(
    Hardware,
    instance_type=st.none() | NAMES,
    board=st.none() | NAMES,
    cpu=NAMES,
    cpus=COUNTS,
    usable_cpus=COUNTS,
    memory_bytes=COUNTS,
    accelerators=st.lists(GROUPS, max_size=4),
)


@given(MACHINES, NAMES, NAMES, st.sampled_from(["memory", "storage", "network"]))
def test_id_is_a_safe_name_of_a_folder_whatever_the_facts_are(
    machine: Hardware, storage_class: str, filesystem: str, medium: str
) -> None:
    chosen = hardware_id(machine, storage_class, filesystem, medium)
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", chosen)
    assert ".." not in chosen
    assert len(chosen) <= LONGEST
    assert chosen == hardware_id(machine, storage_class, filesystem, medium) == check_id(chosen, "a test")


@given(MACHINES, MACHINES)
def test_differences_are_none_of_equal_machines_and_say_there_and_here_of_others(
    one: Hardware, other: Hardware
) -> None:
    assert hardware_differences(one, one) == []
    for text in hardware_differences(one, other):
        assert " there, " in text
        assert text.endswith(" here")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"accelerators": []}, "accelerators: 8 x NVIDIA H100 80GB HBM3 there, none here"),
        (
            {"accelerators": [msgspec.structs.replace(H100, count=7)]},
            "accelerators: 8 x NVIDIA H100 80GB HBM3 there, 7 here",
        ),
        (
            {"accelerators": [msgspec.structs.replace(H100, pcie_generation=4, pcie_width=8)]},
            "link of NVIDIA H100 80GB HBM3: PCIe 5 x16 there, PCIe 4 x8 here",
        ),
        (
            {"accelerators": [msgspec.structs.replace(H100, memory_bytes=40 * 10**9)]},
            "memory of NVIDIA H100 80GB HBM3: 85.5 GB there, 40.0 GB here",
        ),
        (
            {"accelerators": [Accelerators(name="NVIDIA H200", count=8)]},
            "accelerators: 8 x NVIDIA H100 80GB HBM3 there, 8 x NVIDIA H200 here",
        ),
        ({"usable_cpus": 8}, "usable CPUs: 224 there, 8 here"),
        ({"cpus": 112}, "CPUs: 224 there, 112 here"),
        ({"cpu": "AMD EPYC"}, "CPU: Intel(R) Xeon(R) Platinum 8480+ there, AMD EPYC here"),
        ({"memory_bytes": 32 * 10**9}, "memory: 64.0 GB there, 32.0 GB here"),
        ({"board": None}, "board: Dell Inc. PowerEdge XE9680 there, not told here"),
        ({"instance_type": "p5.48xlarge"}, "instance type: not told there, p5.48xlarge here"),
    ],
)
def test_fact_that_differs_is_named(changes: dict[str, Any], expected: str) -> None:
    assert hardware_differences(msgspec.structs.replace(DELL, **changes), DELL) == [expected]


def test_memory_that_another_kernel_reports_is_no_difference() -> None:
    assert hardware_differences(hardware(memory_bytes=63_500_000_000), hardware()) == []


@pytest.mark.parametrize("text", ["p5.48xlarge", "Our_Rack-7.nvme", "a", "1" * 120])
def test_id_that_a_user_gave_is_taken_as_it_is(text: str) -> None:
    assert check_id(text, "--ckpt-hardware") == text


@pytest.mark.parametrize("text", ["", ".", "..", "a/b", "../x", "-a", ".a", "a b", "a\n", "é", "a" * 121, "a\0b"])
def test_id_that_is_no_safe_name_is_refused_with_one_that_is(text: str) -> None:
    with pytest.raises(SettingError, match=r"from --ckpt-hardware\).* as in ") as refused:
        check_id(text, "--ckpt-hardware")
    suggested = str(refused.value).rpartition(" as in ")[2]
    assert check_id(suggested, "a test") == suggested
