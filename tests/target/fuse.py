"""A real FUSE file system of one empty folder, served by a thread of this process; it needs root and no library."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_IN_HEADER = struct.Struct("<IIQQIIII")
_LOOKUP, _FORGET, _GETATTR, _STATFS, _INIT = 1, 2, 3, 17, 26
_OPENDIR, _READDIR, _RELEASEDIR, _INTERRUPT, _BATCH_FORGET = 27, 28, 29, 36, 42
_WITHOUT_ANSWER = {_FORGET, _INTERRUPT, _BATCH_FORGET}
_BLOCK_BYTES = 4096
_MS_NOSUID_NODEV = 2 | 4


@contextmanager
def fuse_mount(point: Path, filesystem: str, source: str, free_bytes: int) -> Iterator[None]:
    """Mount it as `filesystem` (`fuse.NAME`); `OSError` where that is not possible."""
    fd = os.open("/dev/fuse", os.O_RDWR)
    try:
        options = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        arguments = [source.encode(), os.fsencode(point), filesystem.encode()]
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(*arguments, ctypes.c_ulong(_MS_NOSUID_NODEV), options.encode()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(point))
        server = threading.Thread(target=_serve, args=(fd, free_bytes), daemon=True)
        server.start()
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(point)], check=True, timeout=5)
            server.join(5)
    finally:
        os.close(fd)


def _serve(fd: int, free_bytes: int) -> None:
    while True:
        try:
            request = os.read(fd, 2**20)
        except OSError:  # ENODEV, once it is unmounted
            return
        _, opcode, unique, *_ = _IN_HEADER.unpack_from(request)
        if opcode in _WITHOUT_ANSWER:
            continue
        body = _answer(opcode, free_bytes)
        error = 0 if body is not None else -(errno.ENOENT if opcode == _LOOKUP else errno.ENOSYS)
        body = body or b""
        os.write(fd, struct.pack("<IiQ", 16 + len(body), error, unique) + body)


def _answer(opcode: int, free_bytes: int) -> bytes | None:
    blocks = free_bytes // _BLOCK_BYTES
    return {
        _INIT: struct.pack("<IIIIHHII", 7, 31, 2**16, 0, 12, 9, 2**16, 1) + bytes(36),
        _GETATTR: struct.pack("<QII6Q10I", 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, stat.S_IFDIR | 0o755, 2, 0, 0, 0, 0, 0),
        _STATFS: struct.pack("<5Q4I", blocks, blocks, blocks, 9, 9, _BLOCK_BYTES, 255, _BLOCK_BYTES, 0) + bytes(24),
        _OPENDIR: struct.pack("<QII", 1, 0, 0),
        _READDIR: b"",
        _RELEASEDIR: b"",
    }.get(opcode)
