"""What the ranks of a session do at each phase of a test: they tell how it ended, and end it alike."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from pytest_ckpt.plugin.joint import outcome_of
from pytest_ckpt.world.follower import SessionEnded
from pytest_ckpt.world.job import Job
from pytest_ckpt.world.members import Outcome


class Together:
    """What the ranks of a session do at each phase of a test."""

    def __init__(self, config: pytest.Config, job: Job) -> None:
        self.config, self.job = config, job
        _keep_events_out_of_reports(config)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Set up on all ranks, or on none."""
        return (yield from self._together(item, "setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Run on all ranks, with one outcome."""
        return (yield from self._together(item, "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Tear down on all ranks, with one outcome."""
        return (yield from self._together(item, "teardown"))

    def agree(self, item: pytest.Item, own: Outcome) -> tuple[str, str, list[int]]:
        """Return the outcome of all, given this rank's own."""
        raise NotImplementedError

    def enter(self, place: str, in_body: bool) -> None:
        """Note where this rank is, and whether tests and fixtures run there."""

    def explained(self, interrupt: KeyboardInterrupt) -> BaseException | None:
        """Return what the test fails with where `interrupt` has a reason among the ranks; None: the session ends."""
        return None

    def _together(self, item: pytest.Item, when: str) -> Generator[None, Any, Any]:
        at = f"{item.nodeid} ({when})"
        self.enter(at, in_body=True)
        error: BaseException | None = None
        result = None
        try:
            result = yield
        except KeyboardInterrupt as interrupt:
            error = self.explained(interrupt)
            if error is None:
                self.enter("the end of the session", in_body=False)
                raise
        except (pytest.exit.Exception, SystemExit, SessionEnded):
            self.enter("the end of the session", in_body=False)
            raise
        except BaseException as raised:
            error = raised
        own = Outcome(at=at, kind="passed") if error is None else outcome_of(item, at, error)
        kind, text, ranks = self.agree(item, own)
        if error is not None and own.kind == kind and (self.job.rank in ranks or not ranks):
            raise error  # with its own traceback; what others failed with is the same, or their own to show
        if kind == "skipped":
            raise pytest.skip.Exception(text, _use_item_location=True)
        if kind == "xfailed":
            raise pytest.xfail.Exception(text)
        if kind == "failed":
            raise pytest.fail.Exception(text, pytrace=False)
        if error is not None:
            raise error
        return result


def _keep_events_out_of_reports(config: pytest.Config) -> None:
    """Keep torch's own log of events, which saves in this process make, out of the reports of failed tests."""
    plugin = config.pluginmanager.getplugin("logging-plugin")
    for name in ("caplog_handler", "report_handler"):
        handler = getattr(plugin, name, None)
        if handler is not None:
            handler.addFilter(lambda record: not record.name.startswith("c10d-"))


def refuse_paper(name: str) -> None:
    """Skip a test whose fixture `name` plans on paper."""
    if name == "ckpt_plan":
        pytest.skip("planning on paper is one process's work: run pytest without a launcher")
