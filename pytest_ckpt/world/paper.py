"""A world on paper: many ranks for the planner, one process for the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_ckpt.world.spawned import SpawnedWorld


class PaperWorld:
    """`size` ranks of which one process plays all: see `World`. `run` returns its one reply."""

    device = "cpu"

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self._process = SpawnedWorld(1, self.device, timeout_s)

    @property
    def start_method(self) -> str:
        """See `World.start_method`."""
        return self._process.start_method

    def run(
        self,
        function: Callable[..., Any],
        /,
        *,
        timeout_s: float | None = None,
        while_waiting: Callable[[], None] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """See `World.run`."""
        return self._process.run(function, timeout_s=timeout_s, while_waiting=while_waiting, **arguments)

    def renew(self) -> bool:
        """See `World.renew`."""
        self.close()
        return True

    def close(self) -> None:
        """See `World.close`."""
        self._process.close()
