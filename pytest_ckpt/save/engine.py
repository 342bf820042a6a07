"""The seam between what is timed and what saves: one engine on one rank, for all rounds of a scenario."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol


class Awaitable(Protocol):
    """What both `concurrent.futures.Future` and `torch.futures.Future` are: `result()` blocks, or raises the cause."""

    def result(self) -> Any:
        """Wait for the end and return what came of it."""


class Pending(NamedTuple):
    """What a save has come to when its call returns."""

    staged: Awaitable | None
    """Ends when training may change its state; None: it may already."""
    completed: Awaitable | None
    """Ends when the checkpoint is complete and can be loaded; None: it is already."""


class Engine(Protocol):
    """Saves a state dict; what lies between `start` and the two futures is measured, all else is not."""

    def prepare(self, location: str) -> None:
        """Get ready for one save into `location`, a path that is not there yet; not timed."""

    def start(self, state_dict: dict[str, Any]) -> Pending:
        """Save `state_dict` into the prepared location, or begin to."""

    def stored_bytes(self) -> int | None:
        """Return the bytes of the checkpoint that was completed last, as its metadata tells; None where it does not."""

    def load(self, state_dict: dict[str, Any], location: str) -> None:
        """Load the checkpoint in `location` into the tensors of `state_dict`."""

    def close(self) -> None:
        """End threads and processes, and let go of staged memory: nothing survives a scenario."""


class TimedSave(NamedTuple):
    """A rank's clock readings of one save, CLOCK_MONOTONIC seconds."""

    called_s: float
    returned_s: float
    unblocked_s: float
    """When training could change its state again."""
    completed_s: float
    waited_s: float = 0.0
    """Of it, from the call on: the wait for an earlier save that was not complete yet."""


class Meanwhile(NamedTuple):
    """What training beside a save knows of it."""

    waited_for_staging_s: float
    completed_s: float
    """When the checkpoint was complete, not when a step noticed; CLOCK_MONOTONIC seconds."""


def timed_save(
    engine: Engine,
    state_dict: dict[str, Any],
    meanwhile: Callable[[Pending], Meanwhile] | None = None,
    earlier: Pending | None = None,
) -> TimedSave:
    """Save with `engine`, the same four readings whatever it is.

    `earlier` is a save that has not been awaited: DCP must not run two at once, so this one begins when it has ended,
    and training waits for that, as torchtitan's does before each async save.
    `meanwhile` runs between the return and the waiting, as training does; without it training waits for the staging
    at once, as a step would that has come to its optimizer.
    """
    called = time.monotonic()
    waited_s = 0.0
    if earlier is not None and earlier.completed is not None:
        earlier.completed.result()
        waited_s = time.monotonic() - called
    pending = engine.start(state_dict)
    returned = unblocked = time.monotonic()
    if meanwhile is not None and pending.completed is not None:
        ran = meanwhile(pending)
        pending.completed.result()
        return TimedSave(called, returned, returned + ran.waited_for_staging_s, ran.completed_s, waited_s)
    if pending.staged is not None:
        pending.staged.result()
        unblocked = time.monotonic()
    if pending.completed is None:
        return TimedSave(called, returned, unblocked, unblocked, waited_s)
    pending.completed.result()
    return TimedSave(called, returned, unblocked, time.monotonic(), waited_s)
