"""What of a file lies in the page cache only, as the kernel tells (cachestat(2), Linux 6.5 and later)."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

_CACHESTAT = 451
"""The number of the call: the same on all of today's architectures."""


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    """Of pages."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently"))


def dirty_bytes(path: str) -> int | None:
    """Return the bytes of the file at `path` that were not yet written back, in whole pages; None: not told.

    0 does not mean durable: the kernel writes back by itself after a while, and what is known of the file's length
    and name is not among its pages.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    counts = _Counts()
    try:
        failed = _syscall()(_CACHESTAT, descriptor, ctypes.byref(_Range(0, 0)), ctypes.byref(counts), 0)
    finally:
        os.close(descriptor)
    return None if failed else (counts.dirty + counts.writeback) * os.sysconf("SC_PAGESIZE")


@cache
def _syscall() -> Any:
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    return call
