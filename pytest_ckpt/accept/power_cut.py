"""A real power cut: what a fresh ext4 volume holds once only what reached its block device is left.

The volume is an image file behind a loop device. What ext4 still keeps in its page cache has not been submitted to the
device and is not in the image; a copy of the image, mounted, replays its journal as after a real cut.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
import time
import warnings
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from types import TracebackType

from pytest_ckpt.accept.durable import sync_path
from pytest_ckpt.errors import CannotFit, CkptError
from pytest_ckpt.target.mounts import read_mounts
from pytest_ckpt.units import format_bytes

PREFIX = "pytest-ckpt-power-cut-"
"""Names of folders, mounts and images begin with it; what a killed process leaves can be told by it."""
TOOLS = ("mkfs.ext4", "mount", "umount")

_MOUNT_OPTIONS = "loop,noatime,commit=600,noinit_itable"
_NOT_HERE = "no power cut here: "
_TIMEOUT_S = 30.0
_COPIES = 5
_BUSY_S = 3.0
_OWN_BYTES = 32 * 2**20
"""Of ext4 itself: journal, tables of inodes, and room for metadata."""
_BLOCK = 2**20


@cache
def why_no_power_cut() -> str | None:
    """Return why no power cut can be made here, None where one can; tried once, in some 50 ms, with a tiny volume."""
    if os.geteuid() != 0:
        return "only root can mount a volume"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{missing[0]} is not installed"
    try:
        with tempfile.TemporaryDirectory(prefix=PREFIX) as folder, PowerCut(folder, 0):
            return None
    except (CkptError, OSError) as error:
        return str(error).removeprefix(_NOT_HERE)


class PowerCut:
    """A volume to save into, and the cut: a context manager for tests of what survives.

        with PowerCut(folder, 300_000_000) as power:
            save_on_all_ranks(power.location + "/ckpt")     # ranks are processes of this host, started before or after
            after = power.cut()
            verify(after + "/ckpt")

    Its image, and one copy for each cut, lie in `folder`, so that this needs up to twice (and with more cuts more)
    `capacity_bytes` of space there: sparse files, deleted as soon as they are mounted and freed with their mount.
    The mount points lie in a folder of mode 0700 in the temporary folder. `capacity_bytes` is what will be saved in
    all.

    Closing unmounts everything, whatever happened; a volume that a process still uses after a few seconds is unmounted
    lazily and a warning says so: it vanishes with that process. Where this process itself is killed, mounts named
    `pytest-ckpt-power-cut-*` stay in the temporary folder, harmless; `umount` frees device and space.

    Raises `CannotFit` where `folder` has no room and `CkptError` where the volume cannot be made: ask
    `why_no_power_cut` before.
    """

    def __init__(self, folder: str | os.PathLike[str], capacity_bytes: int) -> None:
        self._folder = os.path.realpath(folder)
        # A tenth for what ext4 notes of files; with small files a block each.
        self._size_bytes = -(-(capacity_bytes + capacity_bytes // 10 + _OWN_BYTES) // _BLOCK) * _BLOCK
        self._cuts = 0
        self._stack = ExitStack()

    def __enter__(self) -> PowerCut:
        free = shutil.disk_usage(self._folder).free
        if free < 2 * self._size_bytes:
            raise CannotFit(
                f"a power cut needs twice {format_bytes(self._size_bytes)} in {self._folder} (the volume, and its copy "
                f"after the cut), which has {format_bytes(free)} free; choose a smaller model or another folder"
            )
        with ExitStack() as stack:
            self._places = Path(tempfile.mkdtemp(prefix=PREFIX))
            stack.callback(_remove, self._places)
            descriptor, image = tempfile.mkstemp(prefix=PREFIX, suffix=".image", dir=self._folder)
            stack.callback(os.close, descriptor)
            stack.callback(_unlink, image)
            os.truncate(descriptor, self._size_bytes)
            # Of a file full of zeros nothing needs to be written now or in the background.
            lazily = "lazy_itable_init=1,lazy_journal_init=1,nodiscard"
            # Blocks as on a large volume: Python's buffers have their size, and what lies in one at a sync is lost.
            _run("mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", "-E", lazily, image)
            self._image = descriptor
            self._mount = self._mounted(image, "before", stack)
            os.rmdir(os.path.join(self._mount, "lost+found"))
            sync_path(self._mount)  # or the volume's own first transaction would be part of what is cut
            self._statistics = f"/sys/dev/block/{_device(self._mount)}/stat"
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def location(self) -> str:
        """The root of the volume, an empty folder; save into a new folder below it."""
        return self._mount

    def cut(self) -> str:
        """Return the folder that holds what `location` holds after the power has gone now and come back.

        Call it at once: the kernel writes back by itself what is older than half a minute, and a save that was lost
        would be spared. The volume stays as it is, so that more cuts can follow; what a cut returns is a volume of its
        own, and stays until `close`. About a tenth of a second, and the time of copying what was written.

        Raises `CkptError` where the volume is being written to all the time, so that no copy is of one moment: end or
        stop the ranks first; and where what is left cannot be mounted.
        """
        self._cuts += 1
        descriptor, image = tempfile.mkstemp(prefix=PREFIX, suffix=".image", dir=self._folder)
        with ExitStack() as stack:
            stack.callback(os.close, descriptor)
            stack.callback(_unlink, image)
            self._copy(descriptor)
            return self._mounted(image, f"after-{self._cuts}", self._stack)

    def close(self) -> None:
        """Unmount and delete all of it; nothing where there is nothing left."""
        self._stack.close()

    def _copy(self, target: int) -> None:
        """Copy the image of one moment: a copy during which the device was written to is thrown away."""
        for _ in range(_COPIES):
            written = self._written()
            os.truncate(target, 0)
            os.truncate(target, self._size_bytes)
            _copy_data(self._image, target)
            if self._written() == written:
                return
        raise CkptError(
            f"no power cut: the volume was written to during each of {_COPIES} copies of it; cut when no rank is saving"
        )

    def _written(self) -> tuple[str, ...]:
        """Return the device's counters: of writes done, sectors written, and requests under way."""
        counters = Path(self._statistics).read_text().split()
        return counters[4], counters[6], counters[8]

    def _mounted(self, image: str, name: str, stack: ExitStack) -> str:
        """Mount and delete `image`, for as long as `stack`: the loop device keeps the file, and goes with the mount."""
        point = self._places / name
        point.mkdir(mode=0o700)
        stack.callback(_unmount, str(point))
        _run("mount", "-t", "ext4", "-o", _MOUNT_OPTIONS, image, str(point))
        _unlink(image)
        return str(point)


def _copy_data(source: int, target: int) -> None:
    """Copy what is not a hole, through the image's own page cache, which holds all that the device was given."""
    end = 0
    while True:
        try:
            start = os.lseek(source, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole to the end
                return
            raise
        end = os.lseek(source, start, os.SEEK_HOLE)
        while start < end:
            part = os.pread(source, min(8 * _BLOCK, end - start), start)
            if not part:
                raise CkptError("no power cut: the volume's image became shorter while it was copied")
            start += os.pwrite(target, part, start)


def _device(point: str) -> str:
    numbers = [mount.device for mount in read_mounts() if mount.point == os.path.realpath(point)]
    if not numbers:
        raise CkptError(f"no power cut: {point} was mounted, and is not among the mounts of this process")
    return numbers[-1]


def _unmount(point: str) -> None:
    if not os.path.ismount(point):
        return
    deadline = time.monotonic() + _BUSY_S
    while (reason := _failure("umount", point)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if reason is None:
        return
    if failure := _failure("umount", "--lazy", point):
        said = f"could not be unmounted: {failure}"
    else:
        said = f"was in use and has been unmounted lazily; it ends with the process that uses it ({reason})"
    warnings.warn(f"{point} {said}", RuntimeWarning, stacklevel=2)


def _remove(places: Path) -> None:
    """Remove the mount points, which are empty unless one could not be unmounted."""
    for path in (*places.iterdir(), places):
        with suppress(OSError):  # a mount that is left was warned of
            path.rmdir()


def _unlink(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def _run(*command: str) -> None:
    if reason := _failure(*command):
        raise CkptError(f"{_NOT_HERE}{reason}")


def _failure(*command: str) -> str | None:
    """Run `command` and return why it failed; None where it did not."""
    try:
        ended = subprocess.run(
            command, timeout=_TIMEOUT_S, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not end within {_TIMEOUT_S:.0f} s"
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    said = ended.stderr.strip() or f"exit status {ended.returncode}"
    return f"{command[0]}: {said}" if ended.returncode else None
