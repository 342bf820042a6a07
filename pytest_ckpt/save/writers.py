"""The storage writers that a scenario can name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pytest_ckpt.errors import SettingError
from pytest_ckpt.save.factories import require_call
from pytest_ckpt.save.options import FILES, HUGGING_FACE

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageWriter

DEFAULT_WRITER = FILES


def file_system_writer(path: str, *, serialization_format: str = "torch_save", **options: Any) -> StorageWriter:
    """Return DCP's FileSystemWriter as torch makes it: one file per rank, one thread, every file synced."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat

    if serialization_format == "safetensors":
        options["serialization_format"] = SerializationFormat.SAFETENSORS
    return FileSystemWriter(path, **{"sync_files": True, **options})


def hugging_face_writer(path: str, *, enable_consolidation: bool = False, **options: Any) -> StorageWriter:
    """Return DCP's HuggingFaceStorageWriter: safetensors, every rank its own shard, every file synced.

    It takes tensors alone: of the recipes, weights-bf16.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    return HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=enable_consolidation, **options)


WRITERS: dict[str, Callable[..., Any]] = {FILES: file_system_writer, HUGGING_FACE: hugging_face_writer}
"""Those that are known by name."""


def check_options(factory: Callable[..., Any], name: str, options: Mapping[str, Any]) -> None:
    """Raise `SettingError` where `factory` does not take one of `options`."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a builtin tells no signature
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for option in options:
        if option not in known:
            raise SettingError(
                f"writer {name} takes no option {option!r} (from --ckpt-writer-opt); its function takes: "
                f"{', '.join(known) or 'none'}"
            )


def make_writer(
    factory: Callable[..., Any], location: str, name: str, options: Mapping[str, Any] | None = None
) -> StorageWriter:
    """Return what `factory` makes for `location` with `options`; `SettingError` where that is no StorageWriter."""
    from torch.distributed.checkpoint.storage import StorageWriter

    require_call(factory, "writer", name, location, **(options or {}))
    writer = factory(location, **(options or {}))
    if not isinstance(writer, StorageWriter):
        raise SettingError(
            f"writer {name} returned {type(writer).__name__!r}; it must return a "
            "torch.distributed.checkpoint.StorageWriter for the path it is given"
        )
    return writer
