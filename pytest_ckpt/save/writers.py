"""The storage writers that a scenario can name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_ckpt.errors import SettingError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageWriter

DEFAULT_WRITER = "FileSystemWriter"


def file_system_writer(path: str, **options: Any) -> StorageWriter:
    """Return DCP's FileSystemWriter as torch makes it: one file per rank, one thread, every file synced."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    return FileSystemWriter(path, **{"sync_files": True, **options})


def make_writer(
    factory: Callable[..., Any], location: str, name: str, options: dict[str, Any] | None = None
) -> StorageWriter:
    """Return what `factory` makes for `location` with `options`; `SettingError` where that is no StorageWriter."""
    from torch.distributed.checkpoint.storage import StorageWriter

    writer = factory(location, **(options or {}))
    if not isinstance(writer, StorageWriter):
        raise SettingError(
            f"writer {name} returned {type(writer).__name__!r}; it must return a "
            "torch.distributed.checkpoint.StorageWriter for the path it is given"
        )
    return writer
