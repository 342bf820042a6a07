"""Nights on a throttled volume: a baseline grown at 400 MB/s, then quiet nights, slow storage and slow software.

    python -m tests.replay.nights [TIMES]

Runs each kind of night so many times (10) and prints how often it was red, and what it was attributed to. Needs root.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..plugin.project import SUITE, Project, Result
from ..volumes import LoopVolume, loop_volume, throttle

USUAL_BPS = 400_000_000
SIZE = 1536 * 2**20
WANTED_SESSIONS = 5

WRITER = """
import time
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

SLOW = Path(__file__).with_name("slow").exists()


class SlowStream:
    def __init__(self, stream):
        self.stream = stream

    def write(self, data):
        time.sleep(len(data) / {slow_Bps})
        return self.stream.write(data)

    def __getattr__(self, name):
        return getattr(self.stream, name)


class SlowFiles(FileSystem):
    @contextmanager
    def create_stream(self, path, mode):
        with super().create_stream(path, mode) as stream:
            yield SlowStream(stream)


def writer(path):
    made = FileSystemWriter(path)
    if SLOW:
        made.fs = SlowFiles()
    return made
"""


@dataclass
class Nights:
    """A machine with one volume, and the folder in which its nightly job runs."""

    volume: LoopVolume
    project: Project
    state: str = "fp32-adamw"
    usual_Bps: int = USUAL_BPS

    def night(self, *arguments: str, slow_storage: bool = False, slow_software: bool = False) -> Result:
        """Run the nightly job once; slow is half as fast as usual."""
        slow = self.project.path / "slow"
        if slow_software:
            slow.touch()
        else:
            slow.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", *SUITE, "--ckpt-mode=sync", "--ckpt-writer=nightly:writer"]
        command += [f"--ckpt-state={self.state}", f"--ckpt-target=disk={self.volume.mount}", "-p", "no:cacheprovider"]
        command += arguments
        with throttle(self.volume, self.usual_Bps // 2 if slow_storage else self.usual_Bps) as limit:
            return self.project.run(*limit.command(*command))

    def unmounted_night(self, *arguments: str) -> Result:
        """Run it while the volume is not mounted, so that the same path lies on the root file system."""
        with self.volume.unmounted():
            command = [sys.executable, "-m", "pytest", *SUITE, "--ckpt-mode=sync", "--ckpt-writer=nightly:writer"]
            command += [f"--ckpt-state={self.state}", f"--ckpt-target=disk={self.volume.mount}", *arguments]
            return self.project.run(*command)

    def stored(self) -> list[Path]:
        """Return the files of the baseline."""
        return sorted((self.project.path / "baselines").glob("*/*.json"))


@contextmanager
def machine(folder: Path, state: str = "fp32-adamw", usual_Bps: int = USUAL_BPS) -> Iterator[Nights]:
    """Make the machine; skips the test where it cannot be made."""
    with loop_volume(SIZE) as volume:
        project = Project(folder)
        # Beside the volume's own time that makes a save about twice as long.
        project.write("nightly.py", WRITER.replace("{slow_Bps}", str(usual_Bps * 3 // 4)))
        yield Nights(volume, project, state, usual_Bps)


KINDS: dict[str, dict[str, Any]] = {
    "quiet": {},
    "slow storage": {"slow_storage": True},
    "slow software": {"slow_software": True},
}


def main() -> None:
    """Grow a baseline, then count the outcomes of each kind of night."""
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    with tempfile.TemporaryDirectory() as folder, machine(Path(folder)) as nights:
        for _ in range(WANTED_SESSIONS):
            nights.night("--ckpt-baseline=save")
        print(f"{len(nights.stored())} sessions saved at {USUAL_BPS / 1e6:.0f} MB/s")
        for kind, night in KINDS.items():
            seen: Counter[str] = Counter()
            for _ in range(times):
                done = nights.night(**night)
                verdicts = re.findall(r"^  throughput (\w+):", done.out, re.MULTILINE)
                who = re.findall(r"\b(storage|machine|software) slower", done.out)
                phase = re.findall(r"phase (\w+) grew most", done.out)
                seen[f"exit {done.status}, {', '.join(verdicts)} {' '.join(dict.fromkeys(who + phase))}"] += 1
                print(kind, *[line for line in done.out.splitlines() if line.startswith("  throughput")], flush=True)
            print(f"{kind}: {dict(seen)}", flush=True)


if __name__ == "__main__":
    main()
