"""Direct measurements of what a rank does with tensors: serialise them, copy them in memory, fetch them from a GPU."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

import torch

from pytest_ckpt.measure.io_probes import Agree, Reading, alone

BLOCK_BYTES = 40 * 2**20
"""More than the 32 MiB up to which glibc may hand a freed block out again: each new tensor is fresh memory."""


def memory_probe(
    name: str, device: torch.device, *, max_bytes: int, max_seconds: float, agree: Agree = alone
) -> Reading:
    """Repeat one block of the work called `name` (a key of `OPERATIONS`) until one of the bounds is reached.

    `device` is the rank's own; the bounds are overrun by one block at most.
    """
    work, note = OPERATIONS[name](device)
    work()
    agree(BLOCK_BYTES)
    done = 0
    start = now = time.monotonic()
    while done < max_bytes and now - start < max_seconds:
        work()
        done += BLOCK_BYTES
        now = time.monotonic()
    return Reading(bytes=done, start_s=start, end_s=now, block_bytes=BLOCK_BYTES, note=note)


class Nowhere(io.BytesIO):
    """A sink that throws bytes away."""

    def write(self, data: Any) -> int:
        """Take all of `data`."""
        return len(data)


def _serialize(device: torch.device) -> tuple[Callable[[], object], str]:
    block, sink = _block(), Nowhere()
    crc32 = "on" if torch.serialization.get_crc32_options() else "off"
    return lambda: torch.save(block, sink), f"torch.save of one tensor after the other, one thread, crc32 {crc32}"


def _copy(device: torch.device) -> tuple[Callable[[], object], str]:
    return _block().clone, "into fresh memory"


def _copy_warm(device: torch.device) -> tuple[Callable[[], object], str]:
    block = _block()
    copy = block.clone()
    return lambda: copy.copy_(block), "into memory used before"


def _d2h_pinned(device: torch.device) -> tuple[Callable[[], object], str]:
    block = _block().to(device)
    copy = torch.empty_like(block, device="cpu", pin_memory=True)

    def work() -> None:
        copy.copy_(block, non_blocking=True)
        torch.cuda.synchronize(device)

    return work, "into one pinned block"


def _d2h_pageable(device: torch.device) -> tuple[Callable[[], object], str]:
    return _block().to(device).cpu, "into fresh pageable memory"


def _block() -> torch.Tensor:
    return torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8).view(torch.float32)


OPERATIONS: dict[str, Callable[[torch.device], tuple[Callable[[], object], str]]] = {
    "serialize": _serialize,
    "copy": _copy,
    "copy_warm": _copy_warm,
    "d2h_pinned": _d2h_pinned,
    "d2h_pageable": _d2h_pageable,
}
"""For each probe, what makes its unit of work (and a note on it)."""
