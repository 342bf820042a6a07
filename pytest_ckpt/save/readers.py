"""The storage readers that a load can name, for formats that DCP does not read back by their path alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_ckpt.errors import SettingError
from pytest_ckpt.save.factories import require_call
from pytest_ckpt.save.options import HUGGING_FACE

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader


def file_system_reader(path: str) -> StorageReader:
    """Return DCP's FileSystemReader, which `dcp.load` takes by itself for a path."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return FileSystemReader(path)


def hugging_face_reader(path: str) -> StorageReader:
    """Return DCP's HuggingFaceStorageReader: tensors from every `.safetensors` file that lies in the folder."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return HuggingFaceStorageReader(path)


READERS: dict[str, Callable[..., Any]] = {
    "FileSystemReader": file_system_reader,
    "HuggingFaceStorageReader": hugging_face_reader,
}
"""Those that are known by name."""
OF_WRITERS = {HUGGING_FACE: "HuggingFaceStorageReader"}
"""What reads back the checkpoints of the writers of ours that the path does not tell."""


METADATA = ".metadata"
"""Without this file DCP finds no checkpoint in a folder by itself."""


def require_found_by_path(location: str) -> None:
    """Raise `SettingError` where DCP needs to be told what reads the checkpoint at `location`."""
    if "://" not in location and not os.path.exists(os.path.join(location, METADATA)):
        raise SettingError(
            f"the writer left no {METADATA}, so dcp.load(checkpoint_id=...) cannot load its checkpoint by its path; "
            "name what reads its format: --ckpt-reader=package.module:function, from a path to a StorageReader"
        )


def make_reader(factory: Callable[..., Any], location: str, name: str) -> StorageReader:
    """Return what `factory` makes for `location`; `SettingError` where that is no StorageReader."""
    from torch.distributed.checkpoint.storage import StorageReader

    require_call(factory, "reader", name, location)
    reader = factory(location)
    if not isinstance(reader, StorageReader):
        raise SettingError(
            f"reader {name} returned {type(reader).__name__!r}; it must return a "
            "torch.distributed.checkpoint.StorageReader for the path it is given"
        )
    return reader
