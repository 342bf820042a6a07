"""Real volumes on one machine: ext4 on loop devices in memory, and one that the kernel holds to a known rate."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_CGROUP = Path("/sys/fs/cgroup")
_ENTER = 'for group in $0; do echo $$ >"$group/cgroup.procs" || exit; done; exec "$@"'


@dataclass(frozen=True)
class LoopVolume:
    """An ext4 file system of its own."""

    mount: Path
    number: str
    """Of its block device, as `7:0`."""
    device: str

    @contextmanager
    def unmounted(self) -> Iterator[None]:
        """Leave the bare mount point, which lies on the root file system, for a while."""
        _run("umount", str(self.mount))
        try:
            yield
        finally:
            _run("mount", self.device, str(self.mount))


@dataclass(frozen=True)
class Throttle:
    """A control group whose processes may write no more than so much a second to a volume."""

    groups: tuple[Path, ...]

    def command(self, *command: str) -> list[str]:
        """Return the command that runs `command` inside the group: the limit holds for who submits the writes."""
        return ["sh", "-c", _ENTER, " ".join(map(str, self.groups)), *command]


@contextmanager
def loop_volume(size_bytes: int) -> Iterator[LoopVolume]:
    """Mount a new, empty volume whose image lies in memory; skips the test where that is not possible.

    The image is nameless: an identity that follows a loop device to its file would call the volume memory, and rightly.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can mount a volume")
    in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with ExitStack() as stack:
        image = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-volume-", dir=in_memory))) / "image"
        mount = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-mount-")))
        with image.open("wb") as file:
            file.truncate(size_bytes)
        try:
            device = _run("losetup", "--find", "--show", str(image))
            stack.callback(_run, "losetup", "--detach", device)
            image.unlink()
            _run("mkfs.ext4", "-q", "-F", "-m", "0", device)
            _run("mount", device, str(mount))
            stack.callback(_run, "umount", str(mount))
            number = _run("lsblk", "-dno", "MAJ:MIN", device)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no loop device here: {getattr(error, 'stderr', '') or error}")
        (mount / "lost+found").rmdir()
        yield LoopVolume(mount, number, device)


@contextmanager
def throttle(volume: LoopVolume, write_Bps: int) -> Iterator[Throttle]:
    """Make a group that writes at most `write_Bps` to `volume`; skips the test where the kernel cannot do that.

    The group gets the cores first, so that what is seen is the volume's slowness and not that of a busy machine.
    """
    name = f"pytest-ckpt-{os.getpid()}-{volume.number.replace(':', '-')}"
    if (_CGROUP / "blkio").is_dir():  # version 1 of the control groups
        limits = {
            _CGROUP / "blkio" / name / "blkio.throttle.write_bps_device": f"{volume.number} {write_Bps}",
            _CGROUP / "cpu" / name / "cpu.shares": str(2**18),
        }
    else:
        limits = {
            _CGROUP / name / "io.max": f"{volume.number} wbps={write_Bps}",
            _CGROUP / name / "cpu.weight": "10000",
        }
    groups = tuple(dict.fromkeys(file.parent for file in limits))
    with ExitStack() as stack:
        try:
            if len(groups) == 1:
                (_CGROUP / "cgroup.subtree_control").write_text("+io +memory +cpu")
            for group in groups:
                group.mkdir()
                stack.callback(group.rmdir)
            for file, limit in limits.items():
                file.write_text(limit)
        except OSError as error:
            pytest.skip(f"no throttled loop device here: {error}")
        yield Throttle(groups)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, timeout=30, capture_output=True, text=True).stdout.strip()
