"""What an exception in a rank means: where it began, and the cause that DCP's own message hides."""

from __future__ import annotations

import errno
import re
import traceback
from typing import Any

from pytest_ckpt.save.torch_private import wrapped_failures

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_SHORT_WRITE = re.compile(r"unexpected pos (\d+) vs (\d+)|PytorchStreamWriter failed|No space left|File too large")
_LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|Read timeout|heartbeat", re.I
)


def describe(error: BaseException) -> dict[str, Any]:
    """Return plain data about `error`: cause (one line), traceback, origins (ranks it began in), hints."""
    wrapped = wrapped_failures(error)
    inner = [failure for failure, _ in wrapped.values()] or [error]
    cause = "; ".join(dict.fromkeys(_one_line(e) for e in inner))
    hints = [hint for e in inner for hint in _hints(e)]
    text = "".join(traceback.format_exception(error))
    for rank, (failure, stack) in wrapped.items():
        text += f"\non rank {rank}:\n" + "".join(stack.format()) + _one_line(failure) + "\n"
    return {
        "cause": cause,
        "traceback": text,
        "origins": sorted(wrapped),
        "lost_peer": bool(_LOST_PEER.search(str(error))) and not wrapped,
        "hints": list(dict.fromkeys(hints)),
    }


def _one_line(error: BaseException) -> str:
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"


def _hints(error: BaseException) -> list[str]:
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError) and chain.errno in _FULL:
            return [f"target full or write failed: {errno.errorcode[chain.errno]} {chain.strerror}"]
        chain = chain.__cause__ or chain.__context__
    if _SHORT_WRITE.search(str(error)):
        return ["target full or write failed: the storage took fewer bytes than DCP gave it (torch hides the errno)"]
    return []
