"""Real file systems and real processes for the tests of targets; every test has a deadline."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from pytest_ckpt.target.path import PathTarget
from pytest_ckpt.target.spec import TargetSpec

ROOT = Path(__file__).parents[2]
NOBODY = 65534

# A run in another process: it opens a work folder, saves something, says where, and waits to be killed.
_RUN = """
import sys, time
from pytest_ckpt.target.path import PathTarget
from pytest_ckpt.target.spec import TargetSpec
work = PathTarget(TargetSpec("other", sys.argv[1])).open()
round = work.new_round("sync")
import os; os.mkdir(round); open(round + "/shard", "wb").write(b"x" * 5000)
print(work.location, flush=True)
time.sleep(60)
"""

OtherRun = Callable[[str], "tuple[subprocess.Popen[str], str]"]


@pytest.fixture(autouse=True)
def _deadline() -> Iterator[None]:
    def expired(number: int, frame: FrameType | None) -> None:
        # No TimeoutError, which is an OSError and might be taken for an answer of the file system.
        pytest.fail("the test ran past its deadline of 10 s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def target(tmp_path: Path) -> PathTarget:
    folder = tmp_path / "target"
    folder.mkdir()
    return PathTarget(TargetSpec("disk", str(folder)))


@pytest.fixture
def other_run() -> Iterator[OtherRun]:
    """Start a run in another process; the return value is the process and its work folder."""
    started: list[subprocess.Popen[str]] = []

    def start(folder: str) -> tuple[subprocess.Popen[str], str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        command = [sys.executable, "-c", _RUN, folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def nobody() -> Iterator[Path]:
    """Make this process an ordinary user with an own folder, where it runs as root."""
    folder = Path(tempfile.mkdtemp(prefix="ckpt-nobody-"))
    if os.geteuid() != 0:
        yield folder
    else:
        os.chown(folder, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        yield folder
        os.seteuid(0)
    shutil.rmtree(folder)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount a file system of some kind on a fresh folder; unmounted whatever the test does."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount file systems")
    points: list[Path] = []

    def mount(kind: str, source: str, options: str = "rw", name: str = "mount point") -> Path:
        point = tmp_path / name
        point.mkdir(exist_ok=True)
        command = ["mount", "-t", kind, "-o", options, source, str(point)]
        made = subprocess.run(command, capture_output=True, text=True, timeout=5)
        if made.returncode:
            pytest.skip(f"{kind} cannot be mounted here: {made.stderr.strip()}")
        points.append(point)
        return point

    yield mount
    for point in reversed(points):
        subprocess.run(["umount", str(point)], check=True, timeout=5)


@pytest.fixture
def ext4(tmp_path: Path, mounted: Callable[..., Path]) -> Path:
    """Mount an ext4 of 16 MiB on a loop device, which the kernel detaches when it is unmounted."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(16 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, timeout=5)
    return mounted("ext4", str(image), "loop")
