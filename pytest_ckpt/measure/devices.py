"""The accelerators of this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cuda_device_count() -> int:
    """Return how many CUDA devices torch can use.

    torch is only imported where a driver is present: finding out that there is no GPU must cost nothing.
    """
    if not any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")):
        return 0
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cuda_memory_bytes() -> int:
    """Return the free bytes of the visible CUDA device that has least free; 0 where there is none."""
    if not cuda_device_count():
        return 0
    import torch

    return min(torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count()))
