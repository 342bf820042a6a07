"""Does tracing a save change how long it takes? The same saves on the same ranks, with and without."""

from __future__ import annotations

import argparse
import os
import sys
from statistics import median
from typing import NamedTuple

from pytest_ckpt.target.interface import WorkFolder
from pytest_ckpt.target.path import open_target
from pytest_ckpt.target.spec import TargetSpec
from pytest_ckpt.world import commands
from pytest_ckpt.world.functions import listed, reference
from pytest_ckpt.world.spawned import SpawnedWorld

from .pairs import against_limit, few_pairs, ratio
from .sides import MODES, default_writer, fresh_root
from .tracing_states import LARGE, LARGE_BYTES, SMALL, SMALL_BYTES, collect_garbage, large_tensors, small_tensors

LIMIT = 1.02
LIMIT_SHARE = 0.02
PAIRS = 30
WARM_UP = 3

STATES = {
    f"{SMALL} tensors of {SMALL_BYTES // 2**10} KiB a rank": small_tensors,
    f"{LARGE} tensors of {LARGE_BYTES // 2**20} MiB a rank": large_tensors,
}


class Pair(NamedTuple):
    """A save with tracing and the same without, in seconds; the tracer's own cost is of the first."""

    traced_s: float
    bare_s: float
    tracer_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--target", default="/dev/shm", help="folder to save below (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs of each state and mode (default: %(default)s)")
    options = parser.parse_args()
    # As in overhead.py: left alone, glibc makes the copy of an async save cost what it will.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(128 * 1024))
    with fresh_root(options) as root:
        folder = open_target(TargetSpec("speed", str(root), source="tests/speed")).open()
        world = SpawnedWorld(options.ranks, "cpu", 600)
        try:
            found = {state: measure(world, folder, state, options.pairs) for state in STATES}
        finally:
            world.close()
            folder.close()
    return report(found, options)


def measure(world: SpawnedWorld, folder: WorkFolder, state: str, pairs: int) -> dict[str, list[Pair]]:
    """Return for each mode the pairs of saves; whether the traced one goes first alternates."""
    for _ in range(WARM_UP):
        for mode in MODES:
            save(world, folder, state, mode, trace=True)
            save(world, folder, state, mode, trace=False)
    saves: dict[str, list[Pair]] = {mode: [] for mode in MODES}
    for number in range(pairs):
        for mode in MODES:
            timed = {
                trace: save(world, folder, state, mode, trace=trace) for trace in (number % 2 == 0, number % 2 != 0)
            }
            saves[mode].append(Pair(timed[True][0], timed[False][0], timed[True][1]))
        print(f"\r{state}: pair {number + 1} of {pairs}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return saves


def save(world: SpawnedWorld, folder: WorkFolder, state: str, mode: str, *, trace: bool) -> tuple[float, float]:
    """Save once, delete it again, and return the seconds of the save and of the tracing in it."""
    world.run(collect_garbage)
    ref = reference(STATES[state], "state")
    own = listed(ref)
    world.run(commands.prepare, model="own", state="user", function=own, mode=mode, writer=default_writer())
    location = folder.new_round(mode)
    replies = world.run(
        commands.save_round,
        location=location,
        trace=trace,
    )
    folder.remove(location)
    save_s = max(reply["completed_s"] for reply in replies) - min(reply["called_s"] for reply in replies)
    return save_s, max(reply["trace"]["tracer_s"] if trace else 0.0 for reply in replies)


def report(found: dict[str, dict[str, list[Pair]]], options: argparse.Namespace) -> int:
    """Print a line for each state and mode, and return the exit status."""
    fell_short = False
    for state, saves in found.items():
        print(f"{state}, {options.ranks} ranks, {options.target}, {options.pairs} pairs per mode")
        for mode, pairs in saves.items():
            traced, bare = [pair.traced_s for pair in pairs], [pair.bare_s for pair in pairs]
            of_pairs = ratio(traced, bare)
            share = median(pair.tracer_s / pair.traced_s for pair in pairs)
            beyond, verdict = against_limit(of_pairs, LIMIT)
            fell_short |= beyond or share > LIMIT_SHARE
            print(
                f"{mode:<6} median traced {median(traced) * 1e3:.1f} ms, bare {median(bare) * 1e3:.1f} ms; "
                f"ratio {of_pairs.middle:.4f}, 95 % interval {of_pairs.low:.4f} to {of_pairs.high:.4f}: {verdict}; "
                f"the tracer's own cost {median(pair.tracer_s for pair in pairs) * 1e3:.2f} ms, {100 * share:.2f} % "
                f"of the save: {'falls short' if share > LIMIT_SHARE else 'within'} (limit {100 * LIMIT_SHARE:.0f} %)"
            )
    if few := few_pairs(options.pairs, PAIRS):
        print(few)
    return int(fell_short)


if __name__ == "__main__":
    sys.exit(main())
