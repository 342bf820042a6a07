"""Making a finished save durable: the few lines that DCP leaves out."""

from __future__ import annotations

import os


def make_durable(location: str | os.PathLike[str]) -> None:
    """Sync every file and folder of the checkpoint at `location`, and then the folders above it.

    Call it once a save is complete and before anything relies on it: after `dcp.save` returned, after the future of
    `dcp.async_save` is done, or at the end of a writer's `finish`. It syncs what this host wrote, whichever process
    did: one rank of each host is enough. The time is that of writing what lies in the page cache.

    A folder must be synced too, since names lie in it: a file's own sync need not keep its name or its renaming
    (fsync(2)). Those above are new where the save made them, and a sync of one that is not costs nothing.

    Raises `NotADirectoryError` where there is no folder, and the `OSError` of a failed sync.
    """
    folder = os.path.realpath(location)
    if not os.path.isdir(folder):
        raise NotADirectoryError(f"nothing to make durable: {folder} is no folder")
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            if os.path.isfile(os.path.join(place, name)):  # a pipe or a broken link holds nothing
                sync_path(os.path.join(place, name))
        sync_path(place)
    while not os.path.ismount(folder):
        folder = os.path.dirname(folder)
        try:
            sync_path(folder)
        except PermissionError:  # who may not read a folder has hardly made anything in it
            break


def sync_path(path: str) -> None:
    """Sync one file, or one folder: the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
