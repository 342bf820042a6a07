"""A world and a work folder without processes and files: replies are scripted, time passes when a command says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_ckpt.world import commands
from pytest_ckpt.world.interface import FailedRank, RankFailure


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class FakeWorld:
    """The third implementation of `World`: its ranks answer at once, and saves take the seconds they are given."""

    def __init__(self, size: int = 2, save_s: float = 2.0, overhead_s: float = 0.5, steps: list[Any] | None = None):
        self.size = size
        self.device = "cpu"
        self.start_method = "exec"
        self.clock = Clock()
        self.save_s = save_s
        self.overhead_s = overhead_s
        self.fail_in_save: int | None = None
        self.failure: BaseException = RankFailure(
            [FailedRank(rank=1, what="raised", phase="save_round > save", cause="OSError: planted")]
        )
        self.saves = 0
        self.steps: list[Any] = [] if steps is None else steps

    def run(
        self,
        function: Callable[..., Any],
        /,
        *,
        timeout_s: float | None = None,
        while_waiting: Callable[[], None] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        if while_waiting is not None:
            while_waiting()
        if function is commands.prepare:
            self.steps.append("prepare")
            return [{"logical_bytes": 1_000_000}] * self.size
        if function is commands.close_engine:
            self.steps.append("close engine")
            return [None] * self.size
        assert function is commands.save_round
        self.saves += 1
        self.steps.append(("save", arguments["location"]))
        if self.saves == self.fail_in_save:
            raise self.failure
        called = self.clock.now_s
        self.clock.now_s += self.save_s + self.overhead_s
        return [
            {
                "called_s": called + rank * 0.01,
                "returned_s": called + rank * 0.01 + self.save_s / 10,
                "unblocked_s": called + rank * 0.01 + self.save_s / 10,
                "completed_s": called + self.save_s * (1 if rank == self.size - 1 else 0.9),
                "peak_rss_bytes": 100,
                "stored_bytes": 1_000_500 if rank == 0 else None,
                "cpu_s": 0.5,
                "write_bytes": 500_000,
                "disk": None,
                "streams_seen": False,
                "trace": {
                    "called_s": called + rank * 0.01,
                    "returned_s": called + rank * 0.01 + self.save_s / 10,
                    "completed_s": called + self.save_s * (1 if rank == self.size - 1 else 0.9),
                    "events": [],
                    "items": [],
                    "syncs": [],
                },
            }
            for rank in range(self.size)
        ]

    def renew(self) -> bool:
        self.steps.append("renew")
        return True

    def close(self) -> None:
        self.steps.append("close")


class FakeFolder:
    """A work folder that notes what is done with its rounds."""

    location = "/fake"

    def __init__(self, steps: list[Any]) -> None:
        self.steps = steps
        self.made: list[str] = []
        self.removed: list[str] = []

    def new_round(self, name: str) -> str:
        self.made.append(f"{self.location}/{len(self.made)}-{name}")
        return self.made[-1]

    def bytes_in(self, location: str) -> int:
        assert location in self.made
        assert location not in self.removed
        return 1_002_000

    def remove(self, location: str) -> None:
        self.steps.append(("remove", location))
        self.removed.append(location)

    def close(self, keep: bool = False) -> str | None:
        return None


class FakeProgress:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.polls = 0
        self.finished = 0

    def step(self, what: str, location: str | None, expected_bytes: int) -> None:
        self.told.append(what)

    def poll(self) -> None:
        self.polls += 1

    def done(self) -> None:
        self.finished += 1
