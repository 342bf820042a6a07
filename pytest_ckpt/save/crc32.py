"""torch.save without its checksums, in whichever thread a writer serialises.

torch keeps that switch for each thread (2.13), or one for all of them (2.9), and DCP serialises in threads of its own;
the one place that they pass, each for itself and before it serialises, is the opening of a file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
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
        with _switched_off(), open_stream(self._filesystem, path, mode) as stream:
            yield stream


class _Switch:
    """How many files are open without crc32, and what the switch was before the first of them."""

    files = 0
    before = True


class _SwitchOfThread(threading.local, _Switch):
    pass


_lock = threading.Lock()
_of_thread, _of_all = _SwitchOfThread(), _Switch()


@contextmanager
def _switched_off() -> Iterator[None]:
    """Switch crc32 off until the last of the files that share the switch is closed."""
    with _lock:
        switch = _of_thread if _is_per_thread() else _of_all
        if not switch.files:
            switch.before = torch.serialization.get_crc32_options()
            torch.serialization.set_crc32_options(False)
        switch.files += 1
    try:
        yield
    finally:
        with _lock:
            switch.files -= 1
            if not switch.files:
                torch.serialization.set_crc32_options(switch.before)


@cache
def _is_per_thread() -> bool:
    """Return whether this torch has a switch for each thread."""
    here, there = torch.serialization.get_crc32_options(), list[bool]()
    torch.serialization.set_crc32_options(not here)
    other = threading.Thread(target=lambda: there.append(torch.serialization.get_crc32_options()))
    other.start()
    other.join()
    torch.serialization.set_crc32_options(here)
    return there == [here]
