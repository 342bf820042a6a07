"""Made-up machines: folders that look like /proc and /sys of computers that no test can run on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from pytest_ckpt.target.identity import identify, is_root_filesystem
from pytest_ckpt.target.volume import VolumeIdentity
from pytest_ckpt.target.volumes import volumes

SERIAL = "S3R14L"
GB = 10**9


class Machine:
    """A `/proc` and a `/sys` below `root`; every disk has a serial number, which must never be seen."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.sys = root / "sys"
        (self.proc / "self").mkdir(parents=True)
        for folder in ("class/block", "dev/block"):
            (self.sys / folder).mkdir(parents=True)
        self._mounts = 0

    def mount(
        self,
        point: str | Path,
        filesystem: str,
        device: str = "0:40",
        source: str = "none",
        options: str = "rw",
        *,
        root: str = "/",
    ) -> None:
        self._mounts += 1
        escaped = str(point).replace(" ", "\\040")
        with (self.proc / "self/mountinfo").open("a") as file:
            line = f"{self._mounts} 1 {device} {root} {escaped} rw,relatime shared:1 - {filesystem} {source} {options}"
            file.write(line + "\n")

    def device(self, number: str, folder: str, files: Mapping[str, str] | None = None) -> Path:
        """Make a block device in `folder` below /sys/devices; its name is the last part."""
        made = self.sys / "devices" / folder
        write(made, {"dev": number, **(files or {})})
        for link in (self.sys / "class/block" / made.name, self.sys / "dev/block" / number):
            link.symlink_to(os.path.relpath(made, link.parent))
        return made

    def disk(
        self,
        number: str,
        folder: str,
        model: str | None,
        *,
        rotational: int = 0,
        size_bytes: int = 900 * GB,
        files: Mapping[str, str] | None = None,
    ) -> Path:
        facts = {
            "size": str(size_bytes // 512),
            "queue/rotational": str(rotational),
            "queue/scheduler": "[none] mq-deadline kyber",
            "queue/logical_block_size": "512",
            "queue/physical_block_size": "4096",
            "serial": SERIAL,
            "wwid": SERIAL,
            "device/serial": SERIAL,
            "device/wwid": SERIAL,
            "device/vpd_pg80": SERIAL,
        }
        if model is not None:
            facts["device/model"] = model
        return self.device(number, folder, {**facts, **(files or {})})

    def nvme(self, index: int, model: str | None, *, transport: str = "pcie", **facts: int) -> Path:
        folder = f"pci0000:00/0000:00:{index:02x}.0/nvme/nvme{index}/nvme{index}n1"
        return self.disk(f"259:{index}", folder, model, files={"device/transport": transport}, **facts)

    def scsi(self, letter: str, number: str, bus: str, vendor: str, model: str, *, rotational: int) -> Path:
        """Make a SCSI disk on `bus`, which ends in the folder of its host."""
        folder = f"{bus}/target0:0:0/0:0:0:0/block/sd{letter}"
        return self.disk(number, folder, model, rotational=rotational, files={"device/vendor": vendor})

    def ahci(self) -> str:
        write(self.sys / "class/scsi_host/host0", {"proc_name": "ahci"})
        return "pci0000:00/0000:00:1f.2/ata1/host0"

    def partition(self, number: str, of: Path) -> Path:
        made = self.device(number, f"{of.relative_to(self.sys / 'devices')}/{of.name}p1", {"partition": "1"})
        (made / "slaves").mkdir()
        return made

    def stacked(self, number: str, name: str, below: Iterable[Path], files: Mapping[str, str]) -> Path:
        made = self.device(number, f"virtual/block/{name}", files)
        for one in below:
            write(made / "slaves" / one.name, {})
        (made / "slaves").mkdir(exist_ok=True)
        return made

    def raid(self, number: str, name: str, level: str, below: list[Path], members: int | None = None) -> Path:
        facts = {"md/level": level, "md/raid_disks": str(members or len(below)), "md/uuid": SERIAL}
        return self.stacked(number, name, below, facts)

    def mapped(self, number: str, name: str, below: list[Path], *, uuid: str, label: str = "x") -> Path:
        return self.stacked(number, name, below, {"dm/uuid": uuid + SERIAL, "dm/name": label})

    def identify(self, path: str | Path) -> VolumeIdentity:
        return identify(str(path), proc=str(self.proc), sys=str(self.sys))

    def is_root_filesystem(self, path: str | Path) -> bool:
        return is_root_filesystem(str(path), proc=str(self.proc))

    def volumes(self, beside: str | Path | None = None, least_bytes: int = 0) -> list[VolumeIdentity]:
        path = None if beside is None else str(beside)
        return volumes(beside=path, least_bytes=least_bytes, proc=str(self.proc), sys=str(self.sys))


def write(folder: Path, files: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
