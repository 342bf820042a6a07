"""What damages files, and which bytes of a checkpoint a checksum covers: found by other code than that under test."""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader


def copied(checkpoint: Path, to: Path) -> Path:
    """Copy a checkpoint with its times, over what an earlier example left."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(checkpoint, to)
    return to


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Flip one bit, and leave the file's times as they were: so does a disk."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def truncate(path: Path, size: int) -> None:
    """Cut a file short, and leave its times as they were."""
    status = path.stat()
    os.truncate(path, size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def covered_ranges(checkpoint: Path) -> list[tuple[str, int, int]]:
    """Return file, start and end of each run of bytes that has a checksum, with DCP's own reader and zipfile."""
    found = []
    for info in FileSystemReader(str(checkpoint)).read_metadata().storage_data.values():
        with (checkpoint / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for record in archive.infolist():
                name, extra = (
                    int.from_bytes(data[record.header_offset + at : record.header_offset + at + 2], "little")
                    for at in (26, 28)
                )
                begin = info.offset + record.header_offset + 30 + name + extra
                if record.file_size:
                    found.append((info.relative_path, begin, begin + record.file_size))
    return found
