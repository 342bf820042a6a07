"""Hardware facts of made-up machines: an EC2 p5, a Dell server, a VM on GCP, a container, ARM; and of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pytest_ckpt.measure.hardware import driver_version, find_hardware, look_at_hardware
from pytest_ckpt.records import Accelerators, Hardware

from ..target.machine import write

H100 = "NVIDIA H100 80GB HBM3"
SECRET = "s3r14l-or-name"
VERSION_FILE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (dvs-builder@U16-I3)\n"
    "GCC version:  gcc version 12.2.0\n"
)


class FakeMachine:
    """A /proc, /sys and /dev; every file that might name the machine holds `SECRET`."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sys, self.dev = root / "proc", root / "sys", root / "dev"
        write(self.proc, {"sys/kernel/hostname": SECRET, "meminfo": "MemTotal:       65843212 kB\nMemFree: 1 kB"})
        serials = ("product_serial", "board_serial", "product_uuid", "board_asset_tag", "chassis_asset_tag")
        write(self.sys / "class/dmi/id", dict.fromkeys(serials, SECRET))
        self.dev.mkdir()

    def cpus(self, model: str, count: int) -> FakeMachine:
        block = "processor\t: {}\nvendor_id\t: x\nmodel name\t: {}\ncpu MHz\t\t: 3{}00.123\n"
        write(self.proc, {"cpuinfo": "\n".join(block.format(i, model, i) for i in range(count))})
        write(self.sys, {"devices/system/cpu/online": f"0-{count - 1}"})
        return self

    def firmware(self, **files: str) -> FakeMachine:
        write(self.sys / "class/dmi/id", files)
        return self

    def driver(self, gpus: Mapping[str, str] | None = None) -> FakeMachine:
        write(self.proc / "driver/nvidia", {"version": VERSION_FILE})
        for address, model in (gpus or {}).items():
            information = f"Model: \t\t {model}\nIRQ:   \t\t 18\nGPU UUID: \t GPU-{SECRET}\nBus Location: \t {address}"
            write(self.proc / "driver/nvidia/gpus" / address, {"information": information})
        return self

    def find(self) -> Hardware:
        return find_hardware(str(self.proc), str(self.sys), str(self.dev))

    def notes(self) -> list[str]:
        return look_at_hardware(str(self.proc), str(self.sys), str(self.dev)).notes

    def driver_version(self) -> str | None:
        return driver_version(str(self.proc), str(self.dev))


class NVMLError(Exception):
    pass


class FakeNvml(ModuleType):
    """`pynvml` with some devices; what a device lacks it refuses, as NVML does."""

    def __init__(self, devices: list[dict[str, Any]]) -> None:
        super().__init__("pynvml")
        self.devices = devices
        self.running = 0
        self.failure: Exception | None = None
        asked = {
            "nvmlDeviceGetName": "name",
            "nvmlDeviceGetMemoryInfo": "memory",
            "nvmlDeviceGetMaxPcieLinkGeneration": "generation",
            "nvmlDeviceGetMaxPcieLinkWidth": "width",
            "nvmlDeviceGetMigMode": "mig_mode",
            "nvmlDeviceGetMaxMigDeviceCount": "mig_slots",
        }
        for function, key in asked.items():
            setattr(self, function, lambda device, key=key: self.answer(device, key))
        self.nvmlInit = self.init
        self.nvmlShutdown = self.shutdown
        self.nvmlDeviceGetCount = lambda: len(self.devices)
        self.nvmlDeviceGetHandleByIndex = self.handle
        self.nvmlDeviceGetMigDeviceHandleByIndex = lambda device, slot: self.answer(device["mig"], slot)
        self.nvmlSystemGetDriverVersion = lambda: "551.61"

    def init(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.running += 1

    def shutdown(self) -> None:
        self.running -= 1

    def handle(self, index: int) -> dict[str, Any]:
        if "lost" in self.devices[index]:
            raise NVMLError("GPU is lost")
        return self.devices[index]

    def answer(self, device: dict[Any, Any], key: object) -> Any:
        if key not in device:
            raise NVMLError("Not Supported")
        return SimpleNamespace(total=device[key]) if key == "memory" else device[key]


def h100(**changes: Any) -> dict[str, Any]:
    return {"name": H100, "memory": 85_520_809_984, "generation": 5, "width": 16, "mig_mode": [0, 0], **changes}


Nvml = Callable[..., FakeNvml]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    def install(*devices: dict[str, Any]) -> FakeNvml:
        fake = FakeNvml(list(devices))
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path).cpus("AMD EPYC 7R13 Processor", 4)


def p5(machine: FakeMachine) -> FakeMachine:
    return machine.firmware(sys_vendor="Amazon EC2", product_name="p5.48xlarge", board_vendor="Amazon EC2")


def test_ec2_tells_its_instance_type_and_nvml_its_accelerators(machine: FakeMachine, nvml: Nvml) -> None:
    fake = nvml(*[h100() for _ in range(8)])
    found = p5(machine).driver().find()
    group = Accelerators(name=H100, count=8, memory_bytes=85_520_809_984, pcie_generation=5, pcie_width=16)
    assert (found.instance_type, found.board, found.accelerators) == ("p5.48xlarge", None, [group])
    assert (machine.notes(), fake.running) == ([], 0)


def test_bare_metal_tells_vendor_and_product(machine: FakeMachine) -> None:
    machine.cpus("Intel(R) Xeon(R) Platinum 8480+", 224)
    found = machine.firmware(sys_vendor="Dell Inc.", product_name="PowerEdge XE9680", board_name="0XXXX").find()
    assert (found.instance_type, found.board, found.cpus) == (None, "Dell Inc. PowerEdge XE9680", 224)
    assert found.cpu == "Intel(R) Xeon(R) Platinum 8480+"
    assert found.memory_bytes == 65843212 * 1024


@pytest.mark.parametrize(
    ("vendor", "product", "board"),
    [
        ("Google", "Google Compute Engine", "Google Compute Engine"),
        ("Microsoft Corporation", "Virtual Machine", "Microsoft Corporation Virtual Machine"),
        ("Xen", "HVM domU", "Xen HVM domU"),
        ("VMware, Inc.", "VMware Virtual Platform", "VMware Virtual Platform"),
        ("Alibaba Cloud", "Alibaba Cloud ECS", "Alibaba Cloud ECS"),
        ("Amazon EC2", "Not Specified", None),
        ("Contoso", "p5.48xlarge", "Contoso p5.48xlarge"),
    ],
)
def test_no_instance_type_is_made_of_what_names_none(
    machine: FakeMachine, vendor: str, product: str, board: str | None
) -> None:
    found = machine.firmware(sys_vendor=vendor, product_name=product).find()
    assert (found.instance_type, found.board) == (None, board)


PLACEHOLDERS = ["To Be Filled By O.E.M.", "System Product Name", "Default string", "None", "Not Specified", "OEM", " "]


@pytest.mark.parametrize("text", [*PLACEHOLDERS, "N/A", "Type1ProductConfigId", "System manufacturer", "xxxx", "0"])
def test_placeholders_of_the_firmware_are_no_board(machine: FakeMachine, text: str) -> None:
    machine.firmware(sys_vendor=text, product_name=text, board_vendor=text, board_name=text)
    assert machine.find().board is None


def test_board_stands_in_where_the_product_is_a_placeholder(machine: FakeMachine) -> None:
    machine.firmware(sys_vendor="ASUS", product_name="System Product Name")
    machine.firmware(board_vendor="ASUSTeK COMPUTER INC.", board_name="Pro WS WRX90E-SAGE SE")
    assert machine.find().board == "ASUSTeK COMPUTER INC. Pro WS WRX90E-SAGE SE"


def test_machine_without_firmware_tables_has_neither(machine: FakeMachine) -> None:
    found = machine.find()
    assert (found.instance_type, found.board, found.accelerators) == (None, None, [])


@pytest.mark.parametrize(
    ("implementer", "part", "name"),
    [
        ("0x41", "0xd4f", "ARM Neoverse-V2"),
        ("0xc0", "0xac3", "AmpereOne"),
        ("0x41", "0xfff", "ARM part 0xfff"),
        ("0x99", "0x001", "implementer 0x99 part 0x001"),
    ],
)
def test_arm_cpu_is_named_by_its_maker_and_part(machine: FakeMachine, implementer: str, part: str, name: str) -> None:
    block = (
        f"processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: {implementer}\nCPU part\t: {part}\nCPU revision\t: 1\n"
    )
    write(machine.proc, {"cpuinfo": block})
    assert machine.find().cpu == name


def test_machine_that_tells_nothing_still_has_facts(tmp_path: Path) -> None:
    found = find_hardware(*(str(tmp_path / name) for name in ("proc", "sys", "dev")))
    assert found.cpu.startswith("unknown ")
    assert (found.cpus >= 1, found.usable_cpus, found.memory_bytes) == (True, found.cpus, 0)


def test_cpus_that_are_offline_are_not_counted(machine: FakeMachine) -> None:
    write(machine.sys, {"devices/system/cpu/online": "0-1,4"})
    assert machine.find().cpus == 3


def test_container_with_a_cpuset_and_a_quota_uses_fewer_cpus_of_the_same_machine(machine: FakeMachine) -> None:
    machine.cpus("AMD EPYC 9654 96-Core Processor", 192)
    write(machine.proc / "self", {"status": "Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t0-7", "cgroup": "0::/"})
    assert (machine.find().cpus, machine.find().usable_cpus) == (192, 8)
    write(machine.sys / "fs/cgroup", {"cpu.max": "350000 100000"})
    assert (machine.find().cpus, machine.find().usable_cpus) == (192, 4)


def test_allowed_cpus_that_are_not_there_are_not_usable(machine: FakeMachine) -> None:
    write(machine.proc / "self", {"status": "Cpus_allowed_list:\t0-127"})
    assert machine.find().usable_cpus == 4


@pytest.mark.parametrize(
    ("line", "folder", "files", "usable"),
    [
        ("0::/pod/own", "fs/cgroup/pod", {"cpu.max": "200000 100000"}, 2),
        ("0::/pod/own", "fs/cgroup/pod/own", {"cpu.max": "max 100000"}, 4),
        ("0::/pod/own", "fs/cgroup/other", {"cpu.max": "100000 100000"}, 4),
        ("0::/../..", "fs/cgroup", {"cpu.max": "100000 100000"}, 4),
        ("4:cpu,cpuacct:/d", "fs/cgroup/cpu", {"d/cpu.cfs_quota_us": "150000", "d/cpu.cfs_period_us": "100000"}, 2),
        ("4:cpu:/docker/1", "fs/cgroup/cpu", {"cpu.cfs_quota_us": "10000", "cpu.cfs_period_us": "100000"}, 1),
        ("4:cpu:/d", "fs/cgroup/cpu", {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 4),
        ("nonsense", "fs/cgroup", {"cpu.max": "nonsense"}, 4),
    ],
)
def test_quota_of_any_group_around_the_process_counts(
    machine: FakeMachine, line: str, folder: str, files: dict[str, str], usable: int
) -> None:
    write(machine.proc / "self", {"cgroup": line})
    write(machine.sys / folder, files)
    assert machine.find().usable_cpus == usable


def test_order_of_nvml_and_visible_devices_do_not_matter(
    machine: FakeMachine, nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.driver()
    devices = [h100(), h100(name="NVIDIA T4", generation=3), h100(memory=85_000_000_000)]
    nvml(*devices)
    first = machine.find()
    nvml(*reversed(devices))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert machine.find() == first
    assert [(one.name, one.count, one.memory_bytes) for one in first.accelerators] == [
        (H100, 2, 85_000_000_000),
        ("NVIDIA T4", 1, 85_520_809_984),
    ]


def test_device_on_a_narrower_link_is_a_group_of_its_own(machine: FakeMachine, nvml: Nvml) -> None:
    nvml(h100(), h100(), h100(width=8))
    found = machine.driver().find().accelerators
    assert [(one.count, one.pcie_width) for one in found] == [(1, 8), (2, 16)]


def test_what_a_virtual_gpu_does_not_tell_is_left_out(machine: FakeMachine, nvml: Nvml) -> None:
    nvml({"name": b"NVIDIA A40-8Q"})
    (found,) = machine.driver().find().accelerators
    assert found == Accelerators(name="NVIDIA A40-8Q", count=1)


def test_instances_of_a_divided_device_are_what_is_there(machine: FakeMachine, nvml: Nvml) -> None:
    part = {"name": f"{H100} MIG 1g.10gb", "memory": 10**10}
    nvml(h100(mig_mode=[1, 1], mig_slots=7, mig={0: part, 2: part, 3: {}}), h100(mig_mode=[1, 1]))
    found = machine.driver().find().accelerators
    assert [(one.name, one.count, one.memory_bytes, one.pcie_generation) for one in found] == [
        (f"{H100} MIG", 2, 85_520_809_984, 5),
        (f"{H100} MIG 1g.10gb", 2, 10**10, 5),
    ]


def test_lost_device_is_missing_from_the_count_and_said(machine: FakeMachine, nvml: Nvml) -> None:
    nvml(h100(), h100(lost=True), h100())
    machine.driver()
    assert machine.find().accelerators[0].count == 2
    assert machine.notes() == ["NVML cannot reach accelerator 1 (GPU is lost): it is not counted"]


def test_where_nvml_fails_the_driver_names_its_devices(machine: FakeMachine, nvml: Nvml) -> None:
    nvml().failure = NVMLError("Driver/library version mismatch")
    machine.driver({"0000:1b:00.0": H100, "0000:2b:00.0": H100, "0000:3b:00.0": "Unknown"})
    assert machine.find().accelerators == [
        Accelerators(name=H100, count=2),
        Accelerators(name="unknown NVIDIA GPU", count=1),
    ]
    (note,) = machine.notes()
    assert "Driver/library version mismatch" in note


def test_where_the_binding_is_missing_the_driver_names_its_devices(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine.driver({"0000:1b:00.0": H100}).find().accelerators == [Accelerators(name=H100, count=1)]


def test_devices_without_a_name_are_counted_and_not_dropped(machine: FakeMachine, nvml: Nvml) -> None:
    nvml().failure = NVMLError("Unknown Error")
    write(machine.dev, {"nvidiactl": "", "nvidia0": "", "nvidia1": "", "nvidia-uvm": ""})
    assert machine.find().accelerators == [Accelerators(name="unknown NVIDIA GPU", count=2)]
    assert "counted in /dev" in machine.notes()[0]


def test_driver_without_any_trace_of_devices_gives_none_and_says_so(machine: FakeMachine, nvml: Nvml) -> None:
    nvml().failure = NVMLError("NVML Shared Library Not Found")
    write(machine.dev, {"dxg": ""})
    assert (machine.find().accelerators, len(machine.notes())) == ([], 1)


def test_nvml_is_not_asked_where_there_is_no_driver(machine: FakeMachine, nvml: Nvml) -> None:
    nvml().failure = AssertionError("NVML was asked")
    assert (machine.find().accelerators, machine.notes(), machine.driver_version()) == ([], [], None)


def test_driver_version_is_the_drivers_own_or_that_of_nvml(machine: FakeMachine, nvml: Nvml) -> None:
    nvml()
    write(machine.dev, {"dxg": ""})
    assert machine.driver_version() == "551.61"
    assert machine.driver().driver_version() == "550.54.15"


def test_driver_version_is_not_told_where_nothing_tells_it(machine: FakeMachine, nvml: Nvml) -> None:
    nvml().failure = NVMLError("Unknown Error")
    write(machine.dev, {"nvidiactl": ""})
    assert machine.driver_version() is None


def test_no_serial_number_or_host_name_is_in_the_facts(machine: FakeMachine, nvml: Nvml) -> None:
    nvml().failure = NVMLError("Unknown Error")
    machine.driver({"0000:1b:00.0": H100}).firmware(sys_vendor="Dell Inc.", product_name="PowerEdge XE9680")
    assert SECRET not in repr(machine.find()) + "".join(machine.notes())


def test_serial_numbers_are_not_even_opened(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    read = Path.read_text

    def noted(path: Path, **options: str) -> str:
        opened.append(str(path))
        return read(path, **options)

    monkeypatch.setattr(Path, "read_text", noted)
    machine.find()
    names = {os.path.basename(path) for path in opened if "/dmi/" in path}
    assert names == {"sys_vendor", "product_name", "board_vendor", "board_name"}


def test_facts_of_this_machine_are_what_the_kernel_says() -> None:
    found = find_hardware()
    assert found.cpus == os.sysconf("SC_NPROCESSORS_ONLN")
    assert 1 <= found.usable_cpus <= len(os.sched_getaffinity(0))
    assert found.memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_affinity_of_this_process_changes_what_it_may_use_and_not_the_machine() -> None:
    program = "from pytest_ckpt.measure.hardware import find_hardware as f; h = f(); print(h.cpus, h.usable_cpus)"
    first = min(os.sched_getaffinity(0))
    command = ["taskset", "-c", str(first), sys.executable, "-c", program]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert printed.split() == [str(find_hardware().cpus), "1"]
