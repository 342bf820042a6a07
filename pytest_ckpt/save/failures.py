"""What an exception in a rank means: where it began, and the cause that DCP's own message hides."""

from __future__ import annotations

import errno
import os
import re
import traceback
from typing import Any

from pytest_ckpt.errors import SettingError
from pytest_ckpt.save.torch_private import wrapped_failures
from pytest_ckpt.target.space import tree_bytes
from pytest_ckpt.units import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_SHORT_WRITE = re.compile(r"unexpected pos (\d+) vs (\d+)|PytorchStreamWriter failed|No space left|File too large")
_LOST_PEER = re.compile(
    r"Connection (closed|reset) by (remote )?peer|Connection refused|Broken pipe|Read timeout|heartbeat", re.I
)


def describe(error: BaseException, location: str | None = None, needed_bytes: int | None = None) -> dict[str, Any]:
    """Return plain data about `error`: cause (one line), traceback, origins (ranks it began in), hints.

    `location` is where a save of `needed_bytes` was going on.
    """
    wrapped = wrapped_failures(error)
    inner = [failure for failure, _ in wrapped.values()] or [error]
    hints = [hint for e in inner if (hint := _write_failure(e))]
    if location is not None:
        hints += _space(location, needed_bytes, write_failed=bool(hints))
    is_usage = isinstance(error, SettingError)
    return {
        "cause": _text(error) if is_usage else "; ".join(dict.fromkeys(_one_line(e) for e in inner)),
        "traceback": _encodable("".join(traceback.format_exception(error))),
        "origins": sorted(wrapped),
        "is_usage": is_usage,
        "lost_peer": bool(_LOST_PEER.search(_text(error))) and not wrapped,
        "hints": list(dict.fromkeys(hints)),
    }


def _one_line(error: BaseException) -> str:
    first = (_text(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"


def _text(error: BaseException) -> str:
    try:
        return _encodable(str(error))
    except Exception:  # a user's exception may fail at this too, and its rank must still be able to say so
        return "its message cannot be shown"


def _encodable(text: str) -> str:
    """Return `text` with lone surrogates, as in paths of undecodable bytes, written out."""
    return text.encode(errors="backslashreplace").decode()


def _write_failure(error: BaseException) -> str | None:
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError) and chain.errno in _FULL:
            return f"target full or write failed: {errno.errorcode[chain.errno]} {chain.strerror}"
        chain = chain.__cause__ or chain.__context__
    if _SHORT_WRITE.search(_text(error)):
        return "target full or write failed: the storage took fewer bytes than DCP gave it (torch hides the errno)"
    return None


def _space(location: str, needed_bytes: int | None, write_failed: bool) -> list[str]:
    """Return what is known of the space where a save failed; nothing for a URL."""
    if not os.path.isabs(location):
        return []
    folder = location
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    try:
        written = tree_bytes(location) if os.path.lexists(location) else 0
        space = os.statvfs(folder)
    except OSError as error:
        return [f"{_encodable(location)}: not readable any more ({error.strerror})"]
    free = space.f_bavail * space.f_frsize
    hint = f"{_encodable(location)}: {format_bytes(written)} written there, {format_bytes(free)} free"
    if write_failed and needed_bytes is not None and free >= needed_bytes:
        hint += (
            f"; free space is plenty for a state of {format_bytes(needed_bytes)}, so a quota, a limit (ulimit -f) or "
            "one full storage server is likely"
        )
    return [hint]
