"""One save through `torch.distributed.checkpoint`, timed on the rank that makes it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.checkpoint import state_dict_saver

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlanner
    from torch.distributed.checkpoint.storage import StorageWriter


class TimedSave(NamedTuple):
    """A rank's clock readings of one save (CLOCK_MONOTONIC seconds), and what DCP returned."""

    called_s: float
    returned_s: float
    completed_s: float
    metadata: Metadata


def save(
    mode: str,
    state_dict: dict[str, Any],
    writer: StorageWriter,
    group: ProcessGroup,
    planner: SavePlanner | None = None,
) -> TimedSave:
    """Save `state_dict` with `writer`; `mode` is `sync` (`dcp.save`) or `async` (`dcp.async_save`, thread).

    Readings: before the call; when it returned, from where on training could go on; when the checkpoint was complete.
    """
    called = time.monotonic()
    if mode == "sync":
        metadata = state_dict_saver.save(state_dict, storage_writer=writer, planner=planner, process_group=group)
        completed = time.monotonic()
        return TimedSave(called, completed, completed, metadata)
    upload = state_dict_saver.async_save(state_dict, storage_writer=writer, planner=planner, process_group=group)
    returned = time.monotonic()
    metadata = upload.result()  # type: ignore[union-attr]  # AsyncSaveResponse only from stagers with futures
    return TimedSave(called, returned, time.monotonic(), metadata)


def stored_bytes(metadata: Metadata) -> int | None:
    """Return the bytes of all ranges that a checkpoint's metadata refers to; None where the writer lists none."""
    lengths = [getattr(info, "length", None) for info in (metadata.storage_data or {}).values()]
    if not lengths or None in lengths:
        return None
    return sum(int(length) for length in lengths if length is not None)
