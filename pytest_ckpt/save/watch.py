"""Watching DCP from inside a rank: which phase it is in, and whether every async save was awaited."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Hashable
from concurrent.futures import Future
from typing import Any, Protocol

from pytest_ckpt.errors import CkptError
from pytest_ckpt.save import torch_private

_unread: list[Future[Any]] = []
SHARED_GROUP = "async save on training's group"


class Phases(Protocol):
    """Where what a rank is doing is shown: its status board."""

    def enter(self, phase: str, owner: Hashable = None) -> None:
        """`phase` begins, on this thread or that of `owner`."""

    def leave(self, phase: str, owner: Hashable = None) -> None:
        """`phase` ended."""

    def mark(self, error: BaseException) -> None:
        """`error` is leaving the phases that are open now."""


class UnreadSave(CkptError):
    """A function returned while an async save that it started was still running."""


def install(status: Phases) -> None:
    """Show DCP's events on `status`, and note every future that `async_save` hands out."""
    torch_private.dcp_logger().addHandler(_PhaseHandler(status))
    import torch.distributed as dist
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict_saver

    original = state_dict_saver.async_save

    @functools.wraps(original)
    def async_save(*args: Any, process_group: Any = None, **kwargs: Any) -> Any:
        response = original(*args, process_group=process_group, **kwargs)
        upload: Any = getattr(response, "upload_completion", response)
        _unread.append(upload)
        if process_group is None or process_group is dist.group.WORLD:
            status.enter(SHARED_GROUP, owner=str(id(upload)))
            upload.add_done_callback(lambda done: status.leave(SHARED_GROUP, owner=str(id(done))))
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


def forget_saves() -> None:
    """Forget the async saves that were noted: what they failed with has been read."""
    _unread.clear()


class _PhaseHandler(logging.Handler):
    def __init__(self, status: Phases) -> None:
        super().__init__(logging.DEBUG)
        self._status = status

    def emit(self, record: logging.LogRecord) -> None:
        event = record.msg
        if not isinstance(event, dict) or "func_name" not in event:
            return
        name = str(event["func_name"]).rsplit(".", 1)[-1]
        what = event.get("event")
        if what == "start":
            self._status.enter(name)
        elif what == "end":
            self._status.leave(name)
        elif what == "exception":  # emitted where the exception is handled; inner phases are still open
            error = sys.exc_info()[1]
            if error is not None:
                self._status.mark(error)
            self._status.leave(name)
