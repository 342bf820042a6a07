"""Rank 0's side of a session on attached ranks: its calls are made on all, and what comes of a test is decided here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest

from pytest_ckpt.plugin.interrupts import ignore_ending_signals, interrupt_main_thread
from pytest_ckpt.plugin.joint import describe, joint_outcome, rank_words, taken_along
from pytest_ckpt.plugin.settings import default_root
from pytest_ckpt.plugin.together import Together, refuse_paper
from pytest_ckpt.records import SaveRecord, to_plain
from pytest_ckpt.units import count
from pytest_ckpt.world.attached import AttachedWorld
from pytest_ckpt.world.body_watch import BodyWatch
from pytest_ckpt.world.job import Job
from pytest_ckpt.world.members import Outcome

_LOST_S = 2.0
"""A rank that has died is seen within that."""


class Lead(Together):
    """Rank 0's side."""

    def __init__(self, config: pytest.Config, job: Job, world: AttachedWorld) -> None:
        super().__init__(config, job)
        self.world = world
        self.reason = "rank 0 has ended the session"
        """Why the session ends, for the other ranks."""
        self._watch = BodyWatch(world, interrupt_main_thread, self._give_up)
        self._told_of_loss = False
        self._depth = 0

    def enter(self, place: str, in_body: bool) -> None:
        """See `Together`."""
        self.world.enter(place, in_body)

    def explained(self, interrupt: KeyboardInterrupt) -> BaseException | None:
        """See `Together`; a launcher ends all ranks when one has died, and this rank's own watch a body that hangs."""
        if self._watch.reason is not None:
            self.world.enter("what follows on its time-out", in_body=False)
            return pytest.fail.Exception(self._watch.reason, pytrace=False)
        lost = self.world.lost_ranks(_LOST_S)
        if not lost:
            return None
        self._end_for(lost)
        return taken_along(pytest.fail.Exception("\n".join(lost.values()), pytrace=False))

    def end(self, status: int, wait_s: float) -> bool:
        """Leave last; see `AttachedWorld.end`."""
        self._watch.close()
        return self.world.end(status, self.world.broken or self.reason, wait_s)

    def _give_up(self, reason: str) -> None:
        """End this process, whose main thread cannot be interrupted: no report can be written."""
        with contextlib.suppress(Exception):  # what pytest captures would be lost
            self.config.pluginmanager.getplugin("capturemanager").suspend_global_capture(in_=True)
        with contextlib.suppress(OSError):
            os.write(2, f"\nckpt: {reason}\nckpt: rank 0 cannot be interrupted there, and ends\n".encode())
        self.world.abandon_all(int(pytest.ExitCode.TESTS_FAILED), reason.splitlines()[0])
        os._exit(int(pytest.ExitCode.TESTS_FAILED))

    def agree(self, item: pytest.Item, own: Outcome) -> tuple[str, str, list[int]]:
        """See `Together`; where a rank died, or cannot go on with the others, the session ends after this test."""
        try:
            outcomes = self.world.agree(own)
            if self.world.broken is not None:
                ignore_ending_signals()
        except KeyboardInterrupt:  # torchrun ends all of its ranks when one has died
            lost = self.world.lost_ranks(_LOST_S)
            if not lost:
                raise
            outcomes = {0: own, **{rank: Outcome(at=own.at, kind="lost", text=text) for rank, text in lost.items()}}
            self._end_for(lost)
        if self._told_of_loss:
            outcomes = {rank: outcome for rank, outcome in outcomes.items() if outcome.kind != "lost"}
        kind, text, ranks = joint_outcome(outcomes)
        self._told_of_loss |= self.world.broken is not None and kind == "failed"
        if 0 in ranks:  # whose own report is shown
            for rank in ranks:
                if outcomes[rank].text != own.text:
                    item.add_report_section("call", f"rank {rank} {kind} too", outcomes[rank].text)
        if self.world.broken is not None:
            item.session.shouldfail = self.world.broken
        stop = str(item.session.shouldfail or item.session.shouldstop or "")
        self.world.tell({"kind": kind, "text": text, "ranks": ranks, "stop": stop})
        return kind, text, ranks

    def collective(self, what: str, call: Callable[[], Any], plain: Callable[[Any], Any]) -> Any:
        """Return what `call` returns, which the other ranks then return as well, or raise what it raises on all."""
        if self._depth:
            return call()
        self.world.begin_call(what)
        self._depth += 1
        try:
            value = call()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and (lost := self.world.lost_ranks(_LOST_S)):
                self._end_for(lost)
                error = pytest.fail.Exception("\n".join(lost.values()), pytrace=False)
            self.world.end_call({"raised": describe(error)})
            raise error
        else:
            self.world.end_call({"value": plain(value)})
            return value
        finally:
            self._depth -= 1

    def _end_for(self, lost: dict[int, str]) -> None:
        self.world.broken = self.world.broken or next(iter(lost.values()))
        ignore_ending_signals()

    def measuring(self, name: str, measure: Callable[..., SaveRecord]) -> Callable[..., SaveRecord]:
        """Return `measure`, the object behind the fixture `name`, as a call that all ranks make."""
        refuse_paper(name)

        def on_all_ranks(**arguments: Any) -> SaveRecord:
            record: SaveRecord = self.collective(name, lambda: measure(**arguments), to_plain)
            return record

        return on_all_ranks

    def default_location(self) -> str:
        """Return the default target, which is one folder on all hosts."""
        factory = getattr(self.config, "_tmp_path_factory", None)
        looks = self.config.option.collectonly or self.config.getoption("setupplan", False)
        if factory is None or looks or self.is_on_many_hosts:  # pytest's own folder is on this host alone
            return default_root()
        return str(factory.getbasetemp())

    @property
    def is_on_many_hosts(self) -> bool:
        """Whether the ranks do not share one host."""
        return len(self.world.host_names) > 1

    def header_lines(self) -> list[str]:
        """Return the ranks and where they are."""
        world = self.world
        lines = [f"ckpt: attached to {self.job.launcher}: {count(world.size, 'rank')}"]
        if self.is_on_many_hosts:
            hosts = [
                f"{number} = {name} ({_span([r for r, host in enumerate(world.hosts) if host == number])})"
                for number, name in enumerate(world.host_names)
            ]
            lines[0] += f" on {len(hosts)} hosts: {', '.join(hosts)}"
        return lines


class LeadingWorld:
    """The world that tests on rank 0 see: the ranks of the job, each call made on all of them."""

    def __init__(self, lead: Lead) -> None:
        self._lead, self._world = lead, lead.world
        self.size, self.device, self.start_method = lead.world.size, lead.world.device, lead.world.start_method
        self.hosts = lead.world.hosts

    def run(self, function: Callable[..., Any], /, **arguments: Any) -> list[Any]:
        """See `World.run`; every rank's test makes this call."""
        result: list[Any] = self._lead.collective(
            "ckpt_world.run", lambda: self._world.run(function, **arguments), lambda value: value
        )
        return result

    def renew(self) -> bool:
        """See `World.renew`."""
        return self._world.renew()

    def close(self) -> None:
        """Do nothing: the ranks stay to the end of the session."""


def _span(ranks: list[int]) -> str:
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return rank_words(ranks)
