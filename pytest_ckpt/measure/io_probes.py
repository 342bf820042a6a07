"""Direct measurements of what a resource gives: writes to a target here, the rest in `pytest_ckpt.save.probes`.

A probe reads CLOCK_MONOTONIC before its first and after its last timed byte and is bounded in bytes and in seconds.
Rates are bytes per second.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import stat
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Literal

import msgspec

from pytest_ckpt.errors import CkptError
from pytest_ckpt.records import Probe
from pytest_ckpt.units import format_bytes

MAX_BYTES = 2 * 2**30
MAX_SECONDS = 3.0
BLOCK_BYTES = 16 * 2**20
LEAST_BYTES = 256 * 2**10
"""Nothing smaller is written at once, and every size is a multiple of it: O_DIRECT wants whole device blocks."""
_SYNC_BYTES = 64 * 2**20
_PAGE = 4096
_COPY_BYTES = 2**20

WriteMode = Literal["direct", "buffered", "synced"]
_UNIT_SHARE: dict[WriteMode, float] = {"direct": 0.1, "buffered": 0.1, "synced": 0.25}
"""A unit (what is written between two looks at the clock) takes at most this share of the time allowed.

A synced one gets more, or the latency of fsync would be measured instead of its rate.
"""
Agree = Callable[[int], int]
"""Called once before the clock starts, with bytes: waits for all ranks and returns the least of what they gave."""


class ProbeError(CkptError):
    """A probe could not be made; the message says where, why and how far it came."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What one process measured: `bytes` between two readings of CLOCK_MONOTONIC, or why it was refused."""

    bytes: int
    start_s: float
    end_s: float
    block_bytes: int
    note: str = ""
    refused: str | None = None


def combine(name: str, readings: list[Reading]) -> Probe:
    """Return the probe that the ranks' readings make."""
    seconds = max(r.end_s for r in readings) - min(r.start_s for r in readings)
    refused = [r.refused for r in readings if r.refused is not None]
    return Probe(
        name=name,
        bytes=sum(r.bytes for r in readings),
        seconds=seconds,
        Bps=None if refused else sum(r.bytes for r in readings) / seconds,
        per_rank_Bps=[] if refused else [r.bytes / (r.end_s - r.start_s) for r in readings],
        block_bytes=readings[0].block_bytes,
        note="; ".join(dict.fromkeys(refused or [r.note for r in readings if r.note])),
    )


def alone(count: int) -> int:
    """Agree with nobody: the `Agree` of a single process."""
    return count


class Block:
    """A page-aligned buffer of incompressible bytes; no two uses give the same page, so nothing deduplicates them."""

    def __init__(self, size: int = BLOCK_BYTES) -> None:
        self.size = size
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for start in range(0, size, LEAST_BYTES):
            memory[start : start + LEAST_BYTES] = os.urandom(LEAST_BYTES)
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("Q")
        self._period = size // _PAGE
        self._stamps = memoryview(array("Q", os.urandom(8 * 2 * self._period)))
        self._uses = 0

    def fresh(self, count: int) -> memoryview:
        """Return `count` bytes that were not written before; the next call changes them."""
        self._uses += 1
        shift, pages = self._uses % self._period, count // _PAGE
        self._words[: pages * _PAGE // 8 : _PAGE // 8] = self._stamps[shift : shift + pages]
        return self._bytes[:count]


def write_probe(
    mode: WriteMode,
    path: str,
    *,
    max_bytes: int,
    max_seconds: float,
    agree: Agree = alone,
    clock: Callable[[], float] = time.monotonic,
) -> Reading:
    """Write a new file at `path` until one of the bounds is reached, and remove it; its folder must be there.

    `direct` bypasses the page cache, `buffered` only fills it, `synced` writes and fsyncs in turn. Before the clock
    starts, a few growing writes (22 MiB at most, dropped again) find how much to write between two looks at it, so
    that the time is overrun by little even where many ranks share a slow disk. `ProbeError` where a write fails.
    """
    limit = max(LEAST_BYTES, _whole(max_bytes))
    block = Block(min(BLOCK_BYTES, limit))
    largest = min(_SYNC_BYTES, limit) if mode == "synced" else block.size
    with _NewFile(path, mode, block, clock) as file:
        unit = agree(file.find_unit(largest, max_seconds * _UNIT_SHARE[mode]))
        start = now = clock()
        if unit == 0:
            refused = file.refused or "another rank's file refused O_DIRECT"
            return Reading(bytes=0, start_s=start, end_s=start, block_bytes=0, refused=refused)
        deadline, next_bytes = start + max_seconds, unit
        while file.written < limit and now < deadline:
            took = file.write_unit(min(next_bytes, limit - file.written))
            now = clock()
            next_bytes = min(unit, _fitting(file.last_bytes, took, deadline - now))
        return Reading(
            bytes=file.written,
            start_s=start,
            end_s=now,
            block_bytes=min(unit, block.size),
            note={
                "direct": "past the page cache; a write cache inside the device is not flushed",
                "buffered": "into the page cache; not durable",
                "synced": f"fsync after every {format_bytes(unit)}",
            }[mode],
        )


def zeros_probe(path: str, *, max_bytes: int = MAX_BYTES, max_seconds: float = MAX_SECONDS) -> Probe:
    """Write zeros into the page cache as `dd if=/dev/zero bs=1M` does: what misled people, never a bound."""
    zeros = memoryview(bytes(_COPY_BYTES))
    reading = _pour(itertools.repeat(zeros), path, max_bytes, max_seconds)
    probe = combine("write_zeros", [reading])
    return msgspec.structs.replace(probe, note="zeros into the page cache by one process: not durable")


def copy_probe(source: str, path: str, *, max_bytes: int = MAX_BYTES, max_seconds: float = MAX_SECONDS) -> Probe:
    """Copy the regular files below `source` into one file at `path` as `cp` does: misleads like `zeros_probe`."""
    reading = _pour(_contents(source), path, max_bytes, max_seconds)
    if reading.bytes == 0:
        raise ProbeError(f"{source} holds no bytes to copy; give the folder of a saved checkpoint")
    probe = combine("copy_folder", [reading])
    return msgspec.structs.replace(probe, note="read and written through the page cache by one process: not durable")


class _NewFile:
    """A file that is there only inside the `with` block, out of which an `OSError` comes as a `ProbeError`."""

    def __init__(self, path: str, mode: WriteMode, block: Block | None, clock: Callable[[], float]) -> None:
        self.refused: str | None = None
        self.written = self.last_bytes = 0
        self._path, self._mode, self._block, self._clock = path, mode, block, clock
        self._fd = -1

    def __enter__(self) -> _NewFile:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if self._mode == "direct" else 0)
        try:
            self._fd = os.open(self._path, flags, 0o600)
        except OSError as error:
            with suppress(FileNotFoundError):  # Linux makes the file before it refuses O_DIRECT
                if error.errno == errno.EINVAL:
                    os.unlink(self._path)
            if not self._take_refusal(error):
                raise self._failure(error) from error
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        failure = self._failure(error) if isinstance(error, OSError) else None  # before room is made
        if self._fd >= 0:
            # Dirty pages are dropped here; closing first would write them back on NFS, past any bound.
            with suppress(OSError):
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            os.unlink(self._path)
        if failure is not None:
            raise failure from error

    def write(self, data: memoryview) -> None:
        while data:
            done = os.write(self._fd, data)
            self.written += done
            data = data[done:]

    def write_unit(self, count: int) -> float:
        """Write `count` bytes, fsync where that is the mode, and return the seconds it took."""
        assert self._block is not None
        start = self._clock()
        for begin in range(0, count, self._block.size):
            self.write(self._block.fresh(min(count - begin, self._block.size)))
        if self._mode == "synced":
            os.fsync(self._fd)
        self.last_bytes = count
        return self._clock() - start

    def find_unit(self, largest: int, seconds: float) -> int:
        """Return how much can be written in `seconds`, at most `largest`, with the file left empty; 0 where refused."""
        count = LEAST_BYTES
        while self.refused is None:
            try:
                took = self.write_unit(count)
            except OSError as error:
                if self.written or not self._take_refusal(error):
                    raise
                break
            fitting = min(largest, _fitting(count, took, seconds))
            if fitting <= 4 * count or count >= BLOCK_BYTES:
                os.ftruncate(self._fd, 0)
                os.lseek(self._fd, 0, os.SEEK_SET)
                self.written = 0
                return fitting
            count *= 4
        return 0

    def _take_refusal(self, error: OSError) -> bool:
        if self._mode != "direct" or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        self.refused = f"the file system refuses O_DIRECT ({errno.errorcode[error.errno]}: {error.strerror})"
        return True

    def _failure(self, error: OSError) -> ProbeError:
        folder = os.path.dirname(self._path)
        free = "unknown"
        with suppress(OSError):
            space = os.statvfs(folder)
            free = format_bytes(space.f_bavail * space.f_frsize)
        name = errno.errorcode.get(error.errno or 0, "unknown error")
        return ProbeError(
            f"the {self._mode} write probe in {folder} failed after {format_bytes(self.written)} of this process: "
            f"{name} {error.strerror} ({free} free there)"
        )


def _fitting(count: int, took: float, seconds: float) -> int:
    """Return how much takes `seconds` where `count` bytes took `took`."""
    return max(LEAST_BYTES, _whole(int(count * max(0.0, seconds) / max(took, 1e-6))))


def _whole(count: int) -> int:
    return count // LEAST_BYTES * LEAST_BYTES


def _pour(chunks: Iterable[memoryview], path: str, max_bytes: int, max_seconds: float) -> Reading:
    """Write `chunks` into a new file at `path` until they or the bounds end, then remove it."""
    with _NewFile(path, "buffered", None, time.monotonic) as file:
        start = now = time.monotonic()
        for chunk in chunks:
            file.write(chunk[: max_bytes - file.written])
            now = time.monotonic()
            if file.written >= max_bytes or now - start >= max_seconds:
                break
        return Reading(bytes=file.written, start_s=start, end_s=now, block_bytes=_COPY_BYTES)


def _contents(source: str) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(_COPY_BYTES))
    for folder, _, names in os.walk(source):
        for name in names:
            path = os.path.join(folder, name)
            if not stat.S_ISREG(os.lstat(path).st_mode):
                continue
            with open(path, "rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    yield buffer[:count]
