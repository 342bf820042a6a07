"""Samples memory: `python pss.py SECONDS PID...` prints, until its stdin ends, a line per sample.

A line is the time (CLOCK_MONOTONIC) before and after the sample, and the sum of the proportional set sizes of the
processes and all that descend from them, in bytes. A process of its own, so that sampling does not wait for whoever
measures, and light, so that it is soon round.
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path


def main(interval_s: float, pids: list[int]) -> None:
    wait_s = 0.0
    while not select.select([sys.stdin], [], [], wait_s)[0]:
        began = time.monotonic()
        total = sum(pss_bytes(pid) for root in pids for pid in family(root))
        ended = time.monotonic()
        print(began, ended, total, flush=True)
        wait_s = max(0.0, began + interval_s - ended)


def family(pid: int) -> Iterator[int]:
    """Yield `pid` and its descendants; a process that ends meanwhile has none."""
    yield pid
    try:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                yield from family(int(child))
    except OSError:
        return


def pss_bytes(pid: int) -> int:
    """Return the memory of a process, what it shares divided by those who share it; 0 for one that ended."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


if __name__ == "__main__":
    main(float(sys.argv[1]), [int(pid) for pid in sys.argv[2:]])
