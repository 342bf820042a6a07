"""pytest under torchrun or srun: the ranks meet after the collection, rank 0 alone reports, and all leave together.

Registered only where a launcher started this process; nothing changes in a session that uses none of our fixtures.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from pytest_ckpt.plugin.follow import Follow
from pytest_ckpt.plugin.joint import COLLECTION, collection_difference
from pytest_ckpt.plugin.lead import Lead
from pytest_ckpt.plugin.settings import Settings
from pytest_ckpt.world.control import CannotMeet, Hello
from pytest_ckpt.world.follower import Follower
from pytest_ckpt.world.job import Job
from pytest_ckpt.world.meeting import meet
from pytest_ckpt.world.members import Outcome

_END_S = 20.0
"""Rank 0 waits so long for the others at the end; torchrun gives 30 s to ranks that it ends."""
_WRITERS = ("lfplugin", "nfplugin", "stepwiseplugin")
"""pytest's own plugins that write into its cache."""
_REPORTS = ("xmlpath", "report_log", "htmlpath", "json_report", "csv_path")
"""Options of plugins that open their report's file at once: JUnit, pytest-reportlog, -html, -json-report, -csv."""


class Attached:
    """One rank's pytest: joins the other ranks once tests of ours were collected, and leaves them last."""

    def __init__(self, config: pytest.Config, job: Job) -> None:
        self.config, self.job = config, job
        self.lead: Lead | None = None
        self.follow: Follow | None = None
        self._session: pytest.Session | None = None
        self._muted: tuple[Any, Any, io.StringIO] | None = None

    def write_no_reports(self) -> None:
        """Let plugins that are not configured yet open no file of a report: that is rank 0's."""
        for option in _REPORTS if self.job.rank else ():
            if hasattr(self.config.option, option):
                setattr(self.config.option, option, None)

    @property
    def is_joined(self) -> bool:
        """Whether the ranks of this session have met."""
        return self.lead is not None or self.follow is not None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Keep what a rank above 0 prints, until it is known whether this session is one of ours."""
        self._session = session
        reporter: Any = self.config.pluginmanager.getplugin("terminalreporter")
        if self.job.rank and reporter is not None:
            kept = io.StringIO()
            self._muted = (reporter._tw, reporter._tw._file, kept)
            reporter._tw._file = kept

    def join(self, session: pytest.Session, settings: Settings) -> None:
        """Meet the other ranks; `pytest.UsageError` where they do not come, or did not collect the same tests."""
        tests = [item.nodeid for item in session.items]
        try:
            met = meet(
                self.job,
                device=settings.device,
                timeout_s=settings.timeout_s,
                tests=tests,
                errors=session.testsfailed,
            )
        except CannotMeet as error:
            raise pytest.UsageError(str(error)) from None
        if isinstance(met, Follower):
            self.follow = Follow(self.config, self.job, met, settings)
            self._be_silent()
            self.follow.hear_welcome()
        else:
            self.lead = Lead(self.config, self.job, met[0])
            self._welcome(met[1])
        self.config.pluginmanager.register(self.lead or self.follow, "ckpt-rank")

    def _welcome(self, ranks: list[Hello]) -> None:
        assert self.lead is not None
        self.lead.world.agree(Outcome(at=COLLECTION, kind="passed"))
        difference = collection_difference(ranks)
        if difference is not None:
            self.lead.reason = difference
            raise pytest.UsageError(difference)
        self.lead.world.tell({"default_location": self.lead.default_location()})

    def pytest_collection_finish(self) -> None:
        """Print what was kept where this session is none of ours: its ranks are their own."""
        if not self.is_joined:
            self._speak()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Iterator[None]:
        """Print what was kept where this rank never came to the others."""
        if not self.is_joined:
            self._speak()
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Leave together: rank 0 once it has written everything, with the same exit status on all."""
        if not self.is_joined or self._session is None:
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all ranks at the first that is gone
        status = int(self._session.exitstatus)
        if self.lead is not None:
            ended = self.lead.end(status, _END_S)
        else:
            assert self.follow is not None
            status, ended = self.follow.end(status, self._speak)
            self._session.exitstatus = status
        if not ended:  # a thread sits in a collective that nobody will complete, and Python would wait for it
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _speak(self) -> None:
        if self._muted is not None:
            writer, file, kept = self._muted
            writer._file = file
            writer.write(kept.getvalue(), flush=True)
            self._muted = None

    def _be_silent(self) -> None:
        """Let this rank write no report: rank 0 does."""
        manager = self.config.pluginmanager
        for name in _WRITERS:
            plugin = manager.getplugin(name)
            if plugin is not None:
                manager.unregister(plugin)
        for plugin in list(manager.get_plugins()):
            if type(plugin).__name__ == "LogXML":  # it unregisters itself, and must be there to do so
                plugin.logfile = os.devnull
        session: Any = getattr(self.config, "_benchmarksession", None)
        for name in ("json", "save", "autosave", "histogram", "compare", "compare_fail", "csv"):
            if hasattr(session, name):
                setattr(session, name, None)
