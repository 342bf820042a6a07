"""Does a save through the plugin take longer than the same save in a bare torchrun script?"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

from .pairs import against_limit, few_pairs, ratio
from .sides import MODES, Attached, Bare, Plugin, Side, Timed, add_options, fresh_root

LIMIT = 1.02
PAIRS = 30

FIGURES: dict[str, tuple[str, Callable[[Timed], float]]] = {
    # row: mode, what is compared
    "sync save": ("sync", lambda timed: timed.save_s),
    "async save": ("async", lambda timed: timed.save_s),
    "async stall": ("async", lambda timed: timed.stall_s),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, model="llama3-debug", target="/dev/shm")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs of each mode (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=3, help="saves of each side and mode before them")
    parser.add_argument(
        "--attached", action="store_true", help="ranks that the plugin starts against ranks that torchrun started"
    )
    parser.add_argument("--null", action="store_true", help="bare against bare: what the method itself finds")
    options = parser.parse_args()
    # glibc raises this threshold as it goes, so that the copy of an async save costs a process no page fault or 70,000
    # by chance; given, it stays at its initial value, and every copy of both sides costs the same.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(128 * 1024))
    with ExitStack() as stack:
        root = stack.enter_context(fresh_root(options))
        sides: list[Side] = []
        for make in (Bare if options.null else Plugin, Attached if options.attached else Bare):
            sides.append(make(options, root))
            stack.callback(sides[-1].close)
        saves = measure(sides, options.pairs, options.warm_up)
    return report(saves, options)


def measure(sides: list[Side], pairs: int, warm_up: int) -> dict[str, list[tuple[Timed, Timed]]]:
    """Return for each mode the pairs of saves; which side goes first alternates."""
    for _ in range(warm_up):
        for side in sides:
            for mode in MODES:
                side.save(mode)
    saves: dict[str, list[tuple[Timed, Timed]]] = {mode: [] for mode in MODES}
    for number in range(pairs):
        for mode in MODES:
            if number % 2:
                second, first = sides[1].save(mode), sides[0].save(mode)
            else:
                first, second = sides[0].save(mode), sides[1].save(mode)
            saves[mode].append((first, second))
        print(f"\rpair {number + 1} of {pairs}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return saves


def report(saves: dict[str, list[tuple[Timed, Timed]]], options: argparse.Namespace) -> int:
    """Print a line for each figure and return the exit status."""
    left = "bare (null)" if options.null else "spawned" if options.attached else "plugin"
    right = "attached" if options.attached else "bare"
    print(f"{options.model}, {options.state}, {options.ranks} ranks, {options.target}, {options.pairs} pairs per mode")
    fell_short = False
    for row, (mode, figure) in FIGURES.items():
        first = [figure(pair[0]) for pair in saves[mode]]
        second = [figure(pair[1]) for pair in saves[mode]]
        found = ratio(first, second)
        beyond, verdict = against_limit(found, LIMIT)
        fell_short |= beyond
        print(
            f"{row:<12} median {left} {median(first) * 1e3:.1f} ms, {right} {median(second) * 1e3:.1f} ms; "
            f"ratio {found.middle:.4f}, 95 % interval {found.low:.4f} to {found.high:.4f}: {verdict}"
        )
    if few := few_pairs(options.pairs, PAIRS):
        print(few)
    return int(fell_short)


if __name__ == "__main__":
    sys.exit(main())
