"""Does a save through the plugin need more memory than the same save in a bare torchrun script?"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pytest_ckpt.measure.memory import available_memory_bytes
from pytest_ckpt.model.geometry import find_geometry
from pytest_ckpt.model.recipe import find_recipe, state_bytes

from .sides import MODES, Bare, Plugin, Side, Timed, add_options, fresh_root

LIMIT_BYTES = 2**29
_GIB = 2**30
_INTERVAL_S = 0.02
_START_S = 30.0
_ROOM = 2.3
"""Bytes of memory needed per byte of state: the state, async's copy of it, and the processes."""


_gaps_s: list[float] = []


class Sample(NamedTuple):
    began_s: float
    ended_s: float
    pss_bytes: int


class Peak(NamedTuple):
    """The most memory that all ranks held at once during the saves of a mode, and what they held before them."""

    before_bytes: int
    peak_bytes: int

    def __str__(self) -> str:
        return f"{_gib(self.peak_bytes)} (before {_gib(self.before_bytes)})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, model="qwen3-0.6b", target=tempfile.gettempdir())
    parser.add_argument("--pairs", type=int, default=3, help="pairs of worlds (default: %(default)s)")
    parser.add_argument("--saves", type=int, default=2, help="saves of each mode in a world (default: %(default)s)")
    options = parser.parse_args()
    _require_room(options)
    print(f"{options.model}, {options.state}, {options.ranks} ranks, {options.target}, {options.saves} saves per mode")
    differences: dict[str, list[int]] = {mode: [] for mode in MODES}
    with fresh_root(options) as root:
        for number in range(options.pairs):
            sides = (Plugin, Bare) if number % 2 == 0 else (Bare, Plugin)
            peaks = {make.name: measure(make, options, root) for make in sides}
            for mode in MODES:
                plugin, bare = peaks["plugin"][mode], peaks["bare"][mode]
                difference = plugin.peak_bytes - bare.peak_bytes
                differences[mode].append(difference)
                print(
                    f"pair {number + 1} {mode:<5} peak plugin {plugin}, bare {bare}: {_gib(difference, '+')}",
                    flush=True,
                )
    return report(differences)


def measure(make: type[Plugin] | type[Bare], options: argparse.Namespace, root: Path) -> dict[str, Peak]:
    """Return the peaks of one side in a world of its own: the state twice over leaves no room for two."""
    side: Side = make(options, root)
    try:
        with _sampler(side.pids, root) as file:
            saves = {mode: [side.save(mode) for _ in range(options.saves)] for mode in MODES}
        samples = [_sample(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    finally:
        side.close()
    _gaps_s.extend(later.began_s - earlier.began_s for earlier, later in pairwise(samples))
    return {mode: peak(samples, saves[mode]) for mode in MODES}


def peak(samples: list[Sample], saves: list[Timed]) -> Peak:
    """Return the peak over `saves`; a sample counts for a save in which any of it lies."""
    before = [s.pss_bytes for s in samples if s.ended_s < saves[0].began_s]
    within = [s for save in saves for s in samples if s.began_s <= save.ended_s and s.ended_s >= save.began_s]
    if not before or not within:
        raise SystemExit("a save was over before memory could be sampled: give a larger --model")
    return Peak(before[-1], max(s.pss_bytes for s in within))


def report(differences: dict[str, list[int]]) -> int:
    """Print a line for each mode and return the exit status."""
    print(f"memory was sampled every {median(_gaps_s) * 1e3:.0f} ms, with gaps of up to {max(_gaps_s) * 1e3:.0f} ms")
    fell_short = False
    for mode, values in differences.items():
        middle = median(values)
        beyond = middle > LIMIT_BYTES
        fell_short |= beyond
        print(
            f"{mode:<5} plugin above bare: median {_gib(middle, '+')}, "
            f"{_gib(min(values), '+')} to {_gib(max(values), '+')}: "
            f"{'falls short' if beyond else 'within'} (allowed {_gib(LIMIT_BYTES, '+')})"
        )
    return int(fell_short)


@contextmanager
def _sampler(pids: list[int], root: Path) -> Iterator[Path]:
    """Sample the memory of `pids` into the file that is yielded, for the length of the block."""
    file = Path(tempfile.mkstemp(prefix="pss-", dir=root)[1])
    command = [sys.executable, str(Path(__file__).with_name("pss.py")), str(_INTERVAL_S), *map(str, pids)]
    with open(file, "w") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output)
    try:
        deadline = time.monotonic() + _START_S
        while not file.stat().st_size:  # what was held before the first save has to be known
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"pss.py took no sample within {_START_S:.0f} s")
            time.sleep(_INTERVAL_S)
        yield file
    finally:
        process.communicate()


def _sample(line: str) -> Sample:
    began, ended, pss = line.split()
    return Sample(float(began), float(ended), int(pss))


def _require_room(options: argparse.Namespace) -> None:
    state = state_bytes(find_geometry(options.model, "--model"), find_recipe(options.state, "--state"))
    for what, needed, free in (
        ("memory", int(state * _ROOM) + _GIB, available_memory_bytes()),
        ("disk", int(state * 1.1), shutil.disk_usage(options.target).free),
    ):
        if free < needed:
            raise SystemExit(f"{options.model} needs {_gib(needed)} of {what}, and {_gib(free)} are free")


def _gib(count: float, sign: str = "") -> str:
    return f"{count / _GIB:{sign}.3f} GiB"


if __name__ == "__main__":
    sys.exit(main())
