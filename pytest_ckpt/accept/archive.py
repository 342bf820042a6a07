"""An entry that torch.save wrote: a zip archive within a range of a file, whose records carry a CRC-32 each.

What torch 2.9 to 2.13 writes: every record is stored, not compressed, behind a local header and padding that align it;
a data descriptor behind it and the central directory at the end of the entry hold its CRC. With
`torch.serialization.set_crc32_options(False)` all these are 0, also of records whose bytes are always the same (as
`byteorder`), so that this is no coincidence and no damage.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import NamedTuple

from pytest_ckpt.errors import CkptError

try:  # Intel's ISA-L: ten times as fast as zlib where the processor multiplies without carry.
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

CRC32 = "zlib" if crc32 is zlib.crc32 else "isal"
"""What computes the checksums."""

BLOCK = 1024 * 1024
"""Bytes read at once: few enough that the checksum finds them in the processor's cache."""
KEPT = 4096
"""Bytes at each end of an entry, which hold its small records and, as a rule, its directory."""

Read = Callable[[int, int], bytes]
"""Gives the bytes at an offset of a file: (offset, length)."""

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_SIGNATURE, _DESCRIPTOR = b"PK\x03\x04", b"PK\x07\x08"
_HAS_DESCRIPTOR = 0x08
_UNREADABLE = (zipfile.BadZipFile, struct.error, ValueError, OverflowError, IndexError, NotImplementedError)


class DamagedArchive(CkptError):
    """The archive's structure does not hold: the message is the rest of a sentence about the entry."""


class WrongChecksum(CkptError):
    """Bytes of a record differ from those that were written."""


class Checked(NamedTuple):
    """What was found of an archive that is not known to be bad."""

    covered_bytes: int
    """Equal to their checksums; 0 where the archive was written without."""
    tensor_bytes: int | None
    """Of the one storage that a tensor's archive has; None for none or several."""
    has_checksum: bool


def looks_like_archive(head: bytes, tail: bytes) -> bool:
    """Return whether either end of an entry is that of a zip archive."""
    return head.startswith(_SIGNATURE) or b"PK\x05\x06" in tail[-22:]


def check_archive(window: io.RawIOBase | io.BytesIO, length: int, buffer: memoryview) -> Checked:
    """Read all of an archive of `length` bytes that `window` shows, and compare its checksums.

    Raises `DamagedArchive`, `WrongChecksum`, or the `OSError` of a read. `buffer` is where blocks are read into.
    """
    try:
        with zipfile.ZipFile(window) as archive:
            records, directory = archive.infolist(), archive.start_dir
    except _UNREADABLE as error:
        raise DamagedArchive(f"has a damaged directory ({str(error)[:80] or type(error).__name__})") from None
    if not records:
        raise DamagedArchive("has an empty directory")
    records.sort(key=lambda record: record.header_offset)
    ends = [record.header_offset for record in records[1:]] + [directory]
    if records[0].header_offset != 0:
        raise DamagedArchive("does not begin with its first record")
    known = getattr(window, "known", {})
    has_checksum = any(record.CRC for record in records)
    covered, storages = 0, []
    for record, end in zip(records, ends, strict=True):
        begin = _begin(window, record, end)
        found = known.get((begin, record.file_size))
        if found is None:
            window.seek(begin)
            found = _crc_of(window, record.file_size, buffer)
        if has_checksum:
            if found != record.CRC:
                raise WrongChecksum(
                    f"differs from its checksum in {_short(record.filename)} ({record.file_size} bytes: CRC-32 "
                    f"{found:08x}, written with {record.CRC:08x})"
                )
            covered += record.file_size
        if record.flag_bits & _HAS_DESCRIPTOR:
            window.seek(begin + record.file_size)
            if window.read(8) != _DESCRIPTOR + struct.pack("<I", record.CRC):
                raise DamagedArchive(f"has a damaged descriptor behind {_short(record.filename)}")
        if _is_storage(record.filename):
            storages.append(record.file_size)
    return Checked(covered, storages[0] if len(storages) == 1 else None, has_checksum)


def _begin(window: io.RawIOBase | io.BytesIO, record: zipfile.ZipInfo, end: int) -> int:
    """Return where the bytes of `record` begin, by the header in front of them, which must agree with the directory."""
    window.seek(record.header_offset)
    header = window.read(_LOCAL.size) or b""
    if len(header) != _LOCAL.size:
        raise DamagedArchive("ends within a record's header")
    signature, _, flags, method, _, _, _, _, _, name_bytes, extra_bytes = _LOCAL.unpack(header)
    name = window.read(name_bytes) or b""
    begin = record.header_offset + _LOCAL.size + name_bytes + extra_bytes
    if (
        signature != _SIGNATURE
        or flags != record.flag_bits
        or method != record.compress_type
        or name != record.orig_filename.encode("utf-8", "surrogateescape")
    ):
        raise DamagedArchive(f"has a damaged header in front of {_short(record.filename)}")
    if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
        raise DamagedArchive(f"says that {_short(record.filename)} is compressed, which torch does not do")
    if begin + record.file_size > end:
        raise DamagedArchive(f"has {_short(record.filename)} reach into what follows it")
    return int(begin)


def _crc_of(window: io.RawIOBase | io.BytesIO, length: int, buffer: memoryview) -> int:
    value = 0
    if length <= KEPT:
        data = window.read(length) or b""
        if len(data) != length:
            raise DamagedArchive("ends within a record")
        return int(crc32(data))
    while length:
        count = window.readinto(buffer[: min(length, len(buffer))])
        if not count:
            raise DamagedArchive("ends within a record")
        value = crc32(buffer[:count], value)
        length -= count
    return int(value)


def _is_storage(name: str) -> bool:
    """Return whether a record holds elements: `archive/data/0`, and not `archive/.data/serialization_id`."""
    return "/data/" in name


def _begin_of_storage(head: bytes) -> int:
    """Return where the elements of a tensor's archive seem to begin, by its first bytes; 0 where that is not seen."""
    header = head.rfind(_SIGNATURE, 0, max(head.find(b"/data/0"), 0))
    if header < 0 or header + _LOCAL.size > len(head):
        return 0
    *_, name_bytes, extra_bytes = _LOCAL.unpack_from(head, header)
    return int(header + _LOCAL.size + name_bytes + extra_bytes)


def _short(name: str) -> str:
    return name.partition("/")[2][:60] or name[:60]


class Window(io.RawIOBase):
    """A range of an open file as a file of its own, whose ends are kept: all that is small is taken from there.

    Where the range should hold an archive of one tensor, it is read once from end to end, and the checksum of the bytes
    in which that tensor should lie is taken on the way: the kernel reads ahead of a file that is read in order, and
    looking at the directory first, at the end of each entry, doubled its work.
    """

    def __init__(self, descriptor: int, start: int, length: int, tensor_bytes: int | None, buffer: memoryview) -> None:
        """`tensor_bytes`: of the tensor that the range should hold; None: none. `buffer`: what is read goes there."""
        super().__init__()
        self._descriptor, self._start, self._length, self._position = descriptor, start, length, 0
        self._head, self._tail, self._tail_at = b"", b"", length
        self.known: dict[tuple[int, int], int] = {}
        """Checksums that are there already, by place and length."""
        if tensor_bytes is None:
            self._head = os.pread(descriptor, KEPT, start)
            self._tail_at = max(length - KEPT, 0)
            self._tail = os.pread(descriptor, length - self._tail_at, start + self._tail_at)
        else:
            self._read_through(tensor_bytes, buffer)

    def _read_through(self, tensor_bytes: int, buffer: memoryview) -> None:
        position, value, begin, end = 0, 0, 0, 0
        self._tail_at = max(self._length - KEPT, 0)
        while position < self._length:
            count = os.preadv(self._descriptor, (buffer[: self._length - position],), self._start + position)
            if not count:
                return  # the file became shorter; found where it is missed
            if position == 0:
                self._head = bytes(buffer[: min(KEPT, count)])
                begin = _begin_of_storage(self._head)
                end = begin + tensor_bytes
            part = buffer[max(begin - position, 0) : max(min(end - position, count), 0)]
            if len(part):
                value = crc32(part, value)
            if position + count > self._tail_at:
                self._tail += bytes(buffer[max(self._tail_at - position, 0) : count])
            position += count
        self.known[begin, tensor_bytes] = value

    def seekable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def readable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def tell(self) -> int:
        """See `io.IOBase`."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """See `io.IOBase`; `ValueError` for a place before the beginning."""
        base = (0, self._position, self._length)[whence]
        if base + offset < 0:
            raise ValueError("a place before the beginning")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """See `io.RawIOBase`."""
        begin, left = self._position, self._length - self._position
        if size < 0 or size > left:
            size = max(left, 0)
        if begin + size <= len(self._head):
            found = self._head[begin : begin + size]
        elif begin >= self._tail_at:
            found = self._tail[begin - self._tail_at : begin - self._tail_at + size]
        else:
            found = os.pread(self._descriptor, size, self._start + begin)
        self._position = begin + len(found)
        return found

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """See `io.RawIOBase`; never past the range."""
        wanted = min(len(buffer), self._length - self._position)
        if wanted <= 0:
            return 0
        if wanted <= KEPT:
            found = self.read(wanted)
            buffer[: len(found)] = found
            return len(found)
        count = os.preadv(self._descriptor, (buffer[:wanted],), self._start + self._position)
        self._position += count
        return count
