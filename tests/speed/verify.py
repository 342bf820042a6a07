"""How fast is `pytest-ckpt verify`, compared with reading the same files and doing nothing with them?"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pytest_ckpt.accept.archive import BLOCK, CRC32
from pytest_ckpt.accept.verify import verify
from pytest_ckpt.units import format_bytes, format_rate

from .pairs import few_pairs, ratio

PAIRS = 8
LIMIT = 0.8
_PART = 64 * 2**20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.speed.verify", description=__doc__)
    parser.add_argument("folder", help="a complete checkpoint")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"default: {PAIRS}")
    parser.add_argument("--cold", action="store_true", help="from the storage, not from the page cache")
    processors = min(len(os.sched_getaffinity(0)), 8)
    parser.add_argument("--threads", type=int, default=processors, help=f"of both sides; default: {processors}")
    options = parser.parse_args()

    files = sorted(path for path in Path(options.folder).rglob("*") if path.is_file() and path.name != ".metadata")
    size = sum(path.stat().st_size for path in files)
    threads = options.threads
    print(
        f"{format_bytes(size)} in {len(files)} files, {threads} threads, crc32 of {CRC32}, "
        + ("cold" if options.cold else "warm")
    )
    plain_s, verify_s = [], []
    for number in range(options.pairs + 1):
        sides = ["plain", "verify"] if number % 2 else ["verify", "plain"]
        seconds = {}
        for side in sides:
            if options.cold:
                _forget(files)
            began = time.monotonic()
            if side == "plain":
                _read(files, threads)
                seconds[side] = time.monotonic() - began
            else:
                found = verify(options.folder, threads=threads)
                seconds[side] = time.monotonic() - began
                if not found.is_complete:
                    print(found.text)
                    return 1
        if number == 0:
            continue  # fills the page cache
        plain_s.append(seconds["plain"])
        verify_s.append(seconds["verify"])
        print(
            f"pair {number}: plain {format_rate(size / plain_s[-1])}, verify {format_rate(size / verify_s[-1])}",
            flush=True,
        )
    found_ratio = ratio(plain_s, verify_s)
    share = f"{found_ratio.middle:.3f} (95 %: {found_ratio.low:.3f} to {found_ratio.high:.3f})"
    falls_short = found_ratio.high < LIMIT
    print(f"verify reads at {share} of the plain rate: {'falls short of' if falls_short else 'within'} {LIMIT}")
    if (few := few_pairs(options.pairs, PAIRS)) is not None:
        print(few)
    return int(falls_short)


def _read(files: list[Path], threads: int) -> None:
    parts = [(path, at) for path in files for at in range(0, path.stat().st_size, _PART)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda part: _read_part(part[0], part[1]), parts))


def _read_part(path: Path, start: int) -> None:
    buffer = memoryview(bytearray(BLOCK))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        position = start
        while position < start + _PART and (count := os.preadv(descriptor, [buffer], position)):
            position += count
    finally:
        os.close(descriptor)


def _forget(files: list[Path]) -> None:
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
