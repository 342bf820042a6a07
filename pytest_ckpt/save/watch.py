"""Watching DCP from inside a rank: which phase it is in, and whether every async save was awaited."""

from __future__ import annotations

import functools
import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from pytest_ckpt.errors import CkptError
from pytest_ckpt.save import torch_private

if TYPE_CHECKING:
    from pytest_ckpt.world.status import StatusBoard

_unread: list[Future[Any]] = []
SHARED_GROUP = "async save on training's group"


class UnreadSave(CkptError):
    """A function returned while an async save that it started was still running."""


def install(status: StatusBoard) -> None:
    """Show DCP's events on `status`, and note every future that `async_save` hands out."""
    torch_private.dcp_logger().addHandler(_PhaseHandler(status))
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict_saver

    original = state_dict_saver.async_save

    @functools.wraps(original)
    def async_save(*args: Any, process_group: Any = None, **kwargs: Any) -> Any:
        if process_group is None:
            status.enter(SHARED_GROUP)
        response = original(*args, process_group=process_group, **kwargs)
        upload: Any = getattr(response, "upload_completion", response)
        _unread.append(upload)
        return response

    # Under both names, before a user's module can take either.
    for module in (checkpoint, state_dict_saver):
        module.async_save = async_save  # type: ignore[attr-defined]


def require_saves_finished() -> None:
    """Raise what a finished async save failed with, or `UnreadSave` where one still runs; then forget them all.

    DCP reports a failed async save through its future alone: a program that never reads it exits with status 0.
    """
    futures = list(_unread)
    _unread.clear()
    for future in futures:
        if not future.done():
            raise UnreadSave(
                "returned while its async save was still running; call result() on the future that async_save returned"
            )
        future.result()


class _PhaseHandler(logging.Handler):
    def __init__(self, status: StatusBoard) -> None:
        super().__init__(logging.DEBUG)
        self._status = status

    def emit(self, record: logging.LogRecord) -> None:
        event = record.msg
        if not isinstance(event, dict) or "func_name" not in event:
            return
        name = str(event["func_name"]).rsplit(".", 1)[-1]
        if event.get("event") == "start":
            self._status.enter(name)
        elif event.get("event") == "end":  # after an exception the phase stays to be seen
            self._status.leave(name)
