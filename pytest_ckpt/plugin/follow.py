"""The side of the ranks above 0 of a session on attached ranks: they walk the same tests, and follow rank 0's calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pytest_ckpt.plugin.interrupts import ending_signals_interrupt, ignore_ending_signals
from pytest_ckpt.plugin.joint import COLLECTION, described, taken_along
from pytest_ckpt.plugin.settings import Settings
from pytest_ckpt.plugin.together import Together, refuse_paper
from pytest_ckpt.records import from_plain
from pytest_ckpt.target.interface import Target
from pytest_ckpt.target.path import open_target
from pytest_ckpt.target.spec import TargetSpec
from pytest_ckpt.world.follower import Diverged, Follower, SessionEnded, TakenAlong
from pytest_ckpt.world.job import Job
from pytest_ckpt.world.members import Outcome
from pytest_ckpt.world.spread import close_twins

_WAIT_FOR_RANK_0_S = 600.0
"""For its reports; where it dies that is known at once."""
_ORDINARY = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


class Follow(Together):
    """The side of the ranks above 0, in place of rank 0's `Run`: what our fixtures need of it there."""

    def __init__(self, config: pytest.Config, job: Job, follower: Follower, settings: Settings) -> None:
        super().__init__(config, job)
        self.settings = settings
        self._follower = follower
        self._default_location = ""
        self._world = FollowingWorld(self, job.size, settings.device)

    def hear_welcome(self) -> None:
        """Wait for rank 0's word that all ranks collected the same tests."""
        try:
            welcome = self._follower.agree(Outcome(at=COLLECTION, kind="passed"))
        except SessionEnded as ended:
            raise self._exit(ended) from None
        self._default_location = str(welcome["default_location"])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self) -> Iterator[None]:
        """End in good order where the launcher ends the ranks."""
        with ending_signals_interrupt(ctrl_c=True):
            return (yield)

    def enter(self, place: str, in_body: bool) -> None:
        """See `Together`."""
        self._follower.enter(place)

    def agree(self, item: pytest.Item, own: Outcome) -> tuple[str, str, list[int]]:
        """See `Together`."""
        try:
            verdict = self._follower.agree(own)
        except SessionEnded as ended:
            raise self._exit(ended) from None
        if verdict["stop"]:
            item.session.shouldfail = verdict["stop"]
        return verdict["kind"], verdict["text"], verdict["ranks"]

    def collective(self, what: str, made: Callable[[Any], Any] = lambda value: value) -> Any:
        """Follow rank 0 through its call, and return or raise what it does there."""
        try:
            came_of_it = self._follower.follow(what)
        except SessionEnded as ended:
            raise self._exit(ended) from None
        except Diverged as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        except TakenAlong as error:
            raise taken_along(pytest.fail.Exception(str(error), pytrace=False)) from None
        if "value" in came_of_it:
            return made(came_of_it["value"])
        raise taken_along(described(came_of_it["raised"]))

    def end(self, status: int, say: Callable[[], None]) -> tuple[int, bool]:
        """Leave after rank 0; returns the exit status of all, and whether this process can end in the ordinary way.

        `say` prints what this rank has kept to itself: it is called where the session ends by this rank.
        """
        if self._follower.why_ended is None and status not in (*_ORDINARY, pytest.ExitCode.INTERRUPTED):
            say()
        if self._follower.why_ended is None and status not in _ORDINARY:
            self._follower.leave(f"its pytest ended with status {status}")
        told = self._follower.wait_for_end(_WAIT_FOR_RANK_0_S)
        if told is None:
            sys.stderr.write(f"ckpt: rank {self.job.rank} ends: {self._follower.why_ended or 'rank 0 does not'}\n")
        close_twins(keep=self.settings.keep == "all")
        return (status or 1) if told is None else told, self._follower.close()

    # What the fixtures need

    def target(self, label: str | None = None) -> Target:
        """Return the target called `label`, or the first; rank 0 alone checks and opens it."""
        default = TargetSpec("local", self._default_location, self._default_location, "the default")
        specs = {spec.label: spec for spec in self.settings.targets or (default,)}
        return open_target(specs.get(label or "", next(iter(specs.values()))))

    def world(self, size: int) -> FollowingWorld:
        """Return the ranks of the job."""
        return self._world

    def measuring(self, name: str, request: pytest.FixtureRequest, benchmark: Any) -> Callable[..., Any]:
        """Return what stands for `ckpt_save` or `ckpt_load` on this rank."""
        refuse_paper(name)
        benchmark._mode = f"{name}(...)"  # else pytest-benchmark warns that it was never used

        def follow(**arguments: Any) -> Any:
            return self.collective(name, from_plain)

        return follow

    def _exit(self, ended: SessionEnded) -> BaseException:
        ignore_ending_signals()  # torchrun ends all ranks at the first that is gone
        return pytest.exit.Exception(ended.reason, returncode=ended.status)


class FollowingWorld:
    """The world that tests on other ranks see."""

    start_method = "attached"

    def __init__(self, follow: Follow, size: int, device: str) -> None:
        self._follow, self.size, self.device = follow, size, device

    def run(self, function: Callable[..., Any], /, **arguments: Any) -> list[Any]:
        """See `World.run`; what runs is what rank 0 said."""
        result: list[Any] = self._follow.collective("ckpt_world.run")
        return result

    def renew(self) -> bool:
        """See `World.renew`."""
        return False

    def close(self) -> None:
        """Do nothing: rank 0 has them leave."""
