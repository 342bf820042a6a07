"""Every entry of a checkpoint, read: is its range in a file, are its bytes an archive, are they what was written?"""

from __future__ import annotations

import io
import os
import threading
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from pytest_ckpt.accept.archive import (
    BLOCK,
    DamagedArchive,
    Window,
    WrongChecksum,
    check_archive,
    looks_like_archive,
)
from pytest_ckpt.accept.checkpoint_folder import CheckpointFolder, LeadsOut, NotThere
from pytest_ckpt.accept.listing import Entry, problem
from pytest_ckpt.records import Problem

_JOB_BYTES = 64 * 2**20
_JOB_ENTRIES = 2000
_MOST_THREADS = 8
_FOREIGN = "foreign"
"""An object that is no archive: whether that is damage is seen once all objects are read."""


class Read(NamedTuple):
    """What came of reading some entries."""

    verdicts: list[tuple[Entry, str]]
    problems: list[Problem]
    read_bytes: int
    checked_bytes: int


def read_entries(
    folder: CheckpointFolder, entries: Iterable[Entry], threads: int | None = None, cold: bool = False
) -> Read:
    """Read every entry once, in the order of the files, with `threads` or a thread for each processor (at most 8).

    `cold`: the page cache forgets each file first, as far as it can (a tmpfs lies nowhere else).
    """
    results: list[Read] = []
    jobs: list[tuple[str, list[Entry]]] = []
    by_path: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_path[entry.path].append(entry)
    for path in sorted(by_path):
        placed = sorted(by_path[path], key=lambda entry: entry.start)
        inside, outside = _within_file(folder, path, placed)
        results.append(outside)
        if cold and inside:
            _forget(folder, path)
        jobs += [(path, part) for part in _parts(inside)]
    workers = min(threads or len(os.sched_getaffinity(0)), _MOST_THREADS, max(len(jobs), 1))
    buffers = threading.local()
    with ThreadPoolExecutor(workers) as pool:
        results += pool.map(lambda job: _read_part(folder, job[0], job[1], _buffer(buffers)), jobs)
    return _merged(results)


def _within_file(folder: CheckpointFolder, path: str, entries: list[Entry]) -> tuple[list[Entry], Read]:
    """Return the entries whose ranges lie in the file, and what is wrong with the others."""
    held = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
    try:
        size = os.stat(folder.resolve(path)).st_size
    except LeadsOut as error:
        return [], _all_bad(entries, problem("outside", path, "", f"{error}; {held} would lie in it"))
    except (NotThere, OSError) as error:
        text = str(error) if isinstance(error, NotThere) else f"cannot be read: {error.strerror}"
        kind = "missing-file" if isinstance(error, NotThere) else "unreadable"
        return [], _all_bad(entries, problem(kind, path, "", f"{text}; {held} lay in it"))
    inside = [entry for entry in entries if entry.start + entry.length <= size]
    past = [entry for entry in entries if entry.start + entry.length > size]
    if not past:
        return inside, Read([], [], 0, 0)
    if size == 0:
        return inside, _all_bad(past, problem("empty-file", path, "", f"has 0 bytes; {held} lay in it"))
    needed = max(entry.start + entry.length for entry in past)
    name = past[0].name if len(past) == 1 else ""
    text = f"has {size} of {needed} bytes; {len(past)} of {held} reach past its end"
    return inside, _all_bad(past, problem("truncated", path, name, text))


def _forget(folder: CheckpointFolder, path: str) -> None:
    with suppress(OSError, LeadsOut, NotThere), folder.open(path) as descriptor:
        os.fsync(descriptor)  # what is not yet written cannot be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _all_bad(entries: list[Entry], found: Problem) -> Read:
    return Read([(entry, found.kind) for entry in entries], [found], 0, 0)


def _parts(entries: list[Entry]) -> Iterable[list[Entry]]:
    part: list[Entry] = []
    size = 0
    for entry in entries:
        if part and (size + entry.length > _JOB_BYTES or len(part) == _JOB_ENTRIES):
            yield part
            part, size = [], 0
        part.append(entry)
        size += entry.length
    if part:
        yield part


def _buffer(buffers: threading.local) -> memoryview:
    if not hasattr(buffers, "block"):
        buffers.block = memoryview(bytearray(BLOCK))
    block: memoryview = buffers.block
    return block


def _read_part(folder: CheckpointFolder, path: str, entries: list[Entry], buffer: memoryview) -> Read:
    verdicts: list[tuple[Entry, str]] = []
    problems: list[Problem] = []
    read_bytes = checked_bytes = 0
    try:
        with folder.open(path) as descriptor:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            end = max(entry.start + entry.length for entry in entries)
            block_start, block = 0, b""
            for entry in entries:
                window: io.RawIOBase | io.BytesIO
                if entry.length <= BLOCK:
                    # Small ones are taken out of one read, not read each.
                    if not block_start <= entry.start <= entry.start + entry.length <= block_start + len(block):
                        block_start = entry.start
                        block = _read_block(descriptor, block_start, min(BLOCK, end - block_start))
                    begin = entry.start - block_start
                    window = io.BytesIO(block[begin : begin + entry.length])
                else:
                    window = Window(
                        descriptor,
                        entry.start,
                        entry.length,
                        entry.tensor_bytes if entry.form == "archive" else None,
                        buffer,
                    )
                verdict, bad, checked = _check(entry, window, buffer)
                read_bytes += entry.length
                checked_bytes += checked
                verdicts.append((entry, verdict))
                if bad is not None:
                    problems.append(bad)
    except (OSError, LeadsOut, NotThere) as error:
        text = f"cannot be read: {error.strerror if isinstance(error, OSError) else error}"
        rest = entries[len(verdicts) :]
        problems.append(problem("unreadable", path, rest[0].name, text))
        verdicts += [(entry, "unreadable") for entry in rest]
    return Read(verdicts, problems, read_bytes, checked_bytes)


def _read_block(descriptor: int, start: int, length: int) -> bytes:
    parts = []
    while length and (part := os.pread(descriptor, length, start)):
        parts.append(part)
        start += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _check(entry: Entry, window: io.RawIOBase | io.BytesIO, buffer: memoryview) -> tuple[str, Problem | None, int]:
    """Return the verdict on one entry, what is wrong with it, and how many of its bytes equal their checksums."""
    if entry.form != "archive":
        _read_through(window, buffer)
        return "no-checksum", None, 0
    if not _is_archive(window, entry.length):
        if entry.tensor_bytes is None and entry.offsets is None:
            return _FOREIGN, None, 0
        return _bad("corrupt-header", entry, "is no archive of torch.save")
    try:
        checked = check_archive(window, entry.length, buffer)
    except DamagedArchive as error:
        return _bad("corrupt-header", entry, str(error))
    except WrongChecksum as error:
        return _bad("corrupt", entry, str(error))
    if None not in (entry.tensor_bytes, checked.tensor_bytes) and entry.tensor_bytes != checked.tensor_bytes:
        text = f"holds {checked.tensor_bytes} bytes of elements, and its shape and dtype need {entry.tensor_bytes}"
        return _bad("size-differs", entry, text)
    return ("ok" if checked.has_checksum else "no-checksum"), None, checked.covered_bytes


def _bad(kind: str, entry: Entry, text: str) -> tuple[str, Problem, int]:
    return kind, problem(kind, entry.path, entry.name, text), 0


def _is_archive(window: io.RawIOBase | io.BytesIO, length: int) -> bool:
    window.seek(0)
    head = window.read(4) or b""
    window.seek(max(length - 22, 0))
    return looks_like_archive(head, window.read(22) or b"")


def _read_through(window: io.RawIOBase | io.BytesIO, buffer: memoryview) -> None:
    window.seek(0)
    while window.readinto(buffer):
        pass


def _merged(results: Iterable[Read]) -> Read:
    results = list(results)
    verdicts = [one for result in results for one in result.verdicts]
    problems = [one for result in results for one in result.problems]
    # A planner of the user's own may store objects in any form; one that stores archives stores all so.
    some_are = any(entry.offsets is None and verdict != _FOREIGN for entry, verdict in verdicts)
    for place, (entry, verdict) in enumerate(verdicts):
        if verdict == _FOREIGN:
            verdicts[place] = (entry, "corrupt-header" if some_are else "no-checksum")
            if some_are:
                problems.append(_bad("corrupt-header", entry, "is no archive of torch.save, as other objects are")[1])
    return Read(verdicts, problems, sum(r.read_bytes for r in results), sum(r.checked_bytes for r in results))
