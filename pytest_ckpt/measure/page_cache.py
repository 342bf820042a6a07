"""Making a read cold: the page cache forgets the files of a checkpoint, or all files where the kernel lets us ask."""

from __future__ import annotations

import os
from pathlib import Path

DROP = Path("/proc/sys/vm/drop_caches")


def drop_files(folder: str) -> None:
    """Sync every file below `folder`, then have the page cache forget it: what is not yet written cannot be dropped.

    Pages that another process has mapped stay, and so does everything on a tmpfs, which is nowhere else.
    """
    for place, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(place, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def drop_everything() -> str | None:
    """Have the kernel drop the clean page cache of the whole host; return why it does not, None where it did."""
    try:
        DROP.write_text("1\n")
    except PermissionError:
        return "not root" if os.geteuid() != 0 else "not permitted here"
    except OSError as error:
        return f"{DROP}: {error.strerror}"
    return None
