"""torch.save without its checksums, in whichever thread a writer serialises.

torch keeps that switch for each thread (2.13), and DCP serialises in threads of its own; the one place that they pass,
each for itself and before it serialises, is the opening of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemBase

from pytest_ckpt.errors import SettingError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageWriter


def without_crc32(writer: StorageWriter, name: str) -> None:
    """Make `writer` serialise without crc32; `SettingError` for one whose files are not opened where that is seen."""
    filesystem = getattr(writer, "fs", None)
    if not isinstance(filesystem, FileSystemBase):
        raise SettingError(
            f"crc32=off (from --ckpt-writer-opt) cannot reach writer {name}, which opens its files itself"
        )
    if not isinstance(filesystem.create_stream, _WithoutCrc32):
        filesystem.create_stream = _WithoutCrc32(filesystem)  # type: ignore[method-assign]


class _WithoutCrc32:
    """A file system's `create_stream`; an object and no closure, since it travels to DCP's background process."""

    def __init__(self, filesystem: FileSystemBase) -> None:
        self._filesystem = filesystem

    @contextmanager
    def __call__(self, path: Any, mode: str) -> Iterator[Any]:
        open_stream: Callable[..., Any] = type(self._filesystem).create_stream
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            with open_stream(self._filesystem, path, mode) as stream:
                yield stream
        finally:
            torch.serialization.set_crc32_options(before)
