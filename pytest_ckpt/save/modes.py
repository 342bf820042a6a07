"""The modes of a save: when training may go on, who copies the state, and who writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch.distributed.checkpoint.staging import DefaultStager


class Mode(NamedTuple):
    """One of DCP's ways to save, by the name that torchtitan's users know."""

    name: str
    meaning: str
    staging: str | None
    """None: the writer's own (`FileSystemWriter.stage`), else options of `DefaultStager`."""
    process: bool
    """Whether a background process of each rank writes; else a thread, or for `sync` the caller."""
    needs_cuda: bool = False


MODES = {
    mode.name: mode
    for mode in (
        Mode("sync", "dcp.save: training stands still until the checkpoint is complete", None, False),
        Mode("async", "dcp.async_save: the writer stages a copy, a thread writes it", None, False),
        Mode(
            "async-staged", "dcp.async_save with DefaultStager, whose own thread stages: two futures", "thread", False
        ),
        Mode("async-process", "dcp.async_save: staged into shared memory, a background process writes", "shared", True),
        Mode("async-pinned", "as torchtitan's async_with_pinned_mem: pinned and shared memory", "pinned", True, True),
    )
}
DEFAULT_MODES = ("sync", "async")


def why_unavailable(mode: str, device: str) -> str | None:
    """Return why `mode` cannot run with a state on `device`; None where it can."""
    if MODES[mode].needs_cuda and device != "cuda":
        return f"mode {mode} needs CUDA, and the state lives on {device}"
    return None


def make_stager(mode: Mode) -> DefaultStager | None:
    """Return the stager that all rounds of a scenario use, so that its memory is reused; None for the writer's own."""
    import torch
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    cuda = torch.cuda.is_available()
    options: dict[str, dict[str, Any]] = {
        "thread": {
            "use_pinned_memory": cuda,
            "use_shared_memory": False,
            "use_async_staging": True,
            "use_non_blocking_copy": cuda,
        },
        "shared": {
            "use_pinned_memory": False,
            "use_shared_memory": True,
            "use_async_staging": False,
            "use_non_blocking_copy": False,
        },
        "pinned": {
            "use_pinned_memory": True,
            "use_shared_memory": True,
            "use_async_staging": True,
            "use_non_blocking_copy": True,
        },
    }
    return None if mode.staging is None else DefaultStager(StagingOptions(**options[mode.staging]))
