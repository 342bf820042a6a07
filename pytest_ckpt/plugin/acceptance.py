"""The object behind the fixture `ckpt_acceptance`, and what came of each promise: the table of an acceptance run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pytest_ckpt.accept.known import KNOWN
from pytest_ckpt.accept.trial import NotApplicable, Trial
from pytest_ckpt.plugin import benchmark
from pytest_ckpt.plugin.plan import params_of
from pytest_ckpt.plugin.specs import WriterSpec
from pytest_ckpt.records import PromiseResult
from pytest_ckpt.report.promises import promise_lines
from pytest_ckpt.save.modes import why_unavailable
from pytest_ckpt.save.options import HUGGING_FACE
from pytest_ckpt.world.rounds import Saving

if TYPE_CHECKING:
    from pytest_ckpt.plugin.follow import Follow
    from pytest_ckpt.plugin.run import Run

FIXTURE = "ckpt_acceptance"
_CALL = "a promise"
_MET: pytest.StashKey[dict[str, str]] = pytest.StashKey()
"""Of a test: the known behaviour that it met, by id, with what was seen."""
_DIMENSIONS = ("ckpt_target", "ckpt_world", "ckpt_mode", "ckpt_writer")


def make_trial(run: Run | Follow, request: pytest.FixtureRequest) -> Iterator[Trial | None]:
    """Yield the fixture's value and delete what it saved; None on a rank that follows, where the test does not run."""
    target, world = request.getfixturevalue("ckpt_target"), request.getfixturevalue("ckpt_world")
    mode, writer = request.getfixturevalue("ckpt_mode"), request.getfixturevalue("ckpt_writer")
    why = why_unavailable(mode, world.device) or _why_not_taken(writer)
    if why is not None:
        pytest.skip(why)
    from pytest_ckpt.plugin.follow import Follow

    if isinstance(run, Follow):
        yield None
        return
    engine = run.settings.engine
    saving = Saving(
        mode=mode,
        writer=writer.factory,
        reader=None if writer.reader is None else writer.reader.factory,
        model="",
        state="",
        function=None,
        options=dict(writer.options),
        engine=engine.name,
        engine_factory=engine.factory,
    )
    made = Trial(
        world,
        run.folder(target),
        saving,
        world_beside=run.world_beside,
        is_memory=target.medium == "memory",
        examples=run.settings.examples,
        grace_s=run.settings.grace_s,
        ranks_may_end=run.lead is None,
    )
    request.node.stash[_MET] = made.met
    yield made
    keep = run.settings.keep
    if run.is_closed:  # by an interrupt, which ends a session before its fixtures
        return
    made.close(keep=keep == "all" or (keep == "failed" and request.node.stash.get(_FAILED, False)))


def _why_not_taken(writer: WriterSpec) -> str | None:
    if writer.name == HUGGING_FACE or dict(writer.options).get("serialization_format") == "safetensors":
        return "safetensors hold tensors alone, and the states that are saved here hold other values too"
    return None


_FAILED: pytest.StashKey[bool] = pytest.StashKey()
_REFUSED: pytest.StashKey[bool] = pytest.StashKey()
"""Of a test: what was asked for cannot be used, so that nothing was put to the test."""


class Promises:
    """Registered as a plugin where acceptance tests were selected: collects what came of each, and prints the table."""

    def __init__(self, config: pytest.Config, run: Run) -> None:
        self._config, self._outcome, self._lead = config, run.outcome, run.lead
        self._strict = "known-dcp" in run.settings.fail_on
        self._results: dict[str, PromiseResult] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Put the promise to the test; on attached ranks the others do meanwhile what this one says."""
        if FIXTURE not in pyfuncitem.fixturenames:
            return None
        if self._lead is None:
            self._put_to_the_test(pyfuncitem)
        else:
            self._lead.collective(_CALL, lambda: self._put_to_the_test(pyfuncitem), lambda value: value)
        return True

    def _put_to_the_test(self, item: pytest.Function) -> None:
        """Run the test; tell a failure of ranks or input in its own words, and fail for known behaviour where asked."""
        before = self._outcome.usage_errors
        try:
            with self._outcome.telling():
                try:
                    item.obj(**{name: item.funcargs[name] for name in item._fixtureinfo.argnames})
                except NotApplicable as error:
                    raise pytest.skip.Exception(str(error), _use_item_location=True) from None
        finally:
            item.stash[_REFUSED] = self._outcome.usage_errors > before
        met = item.stash.get(_MET, {})
        if self._strict and met:
            told = "; ".join(f"{known}: {seen}" for known, seen in met.items())
            raise pytest.fail.Exception(f"known of DCP, which --ckpt-fail-on=known-dcp makes a failure: {told}", False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Note what came of a promise."""
        report: Any = yield
        if FIXTURE in getattr(item, "fixturenames", ()) and (report.when == "call" or not report.passed):
            item.stash[_FAILED] = report.failed
            noted = self._result(item, report, call)
            if report.when != "teardown" or report.failed:
                self._results[item.nodeid] = noted
            item.user_properties.append(("ckpt promise", noted.outcome))
            report.user_properties = list(item.user_properties)
        return report

    def _result(self, item: pytest.Item, report: pytest.TestReport, call: pytest.CallInfo[None]) -> PromiseResult:
        met = item.stash.get(_MET, {})
        if report.failed and item.stash.get(_REFUSED, False):
            outcome, why = "not applicable", f"refused: {_told(str(call.excinfo.value) if call.excinfo else '')}"
        elif report.failed:
            outcome, why = "broken", _told(str(call.excinfo.value) if call.excinfo is not None else report.longreprtext)
        elif report.skipped:
            outcome, why = "not applicable", _reason(report)
        elif met:
            outcome, why = "known", "; ".join(met.values())
        else:
            outcome, why = "held", ""
        return PromiseResult(
            promise=_sentence(item),
            scenario=_scenario(item),
            outcome=outcome,  # type: ignore[arg-type]
            why=why,
            known=list(met),
            seconds=report.duration,
        )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the table, and keep the results beside the figures of the last run."""
        if not self._results:
            return
        results = list(self._results.values())
        path = self._kept(results)
        if self._config.get_verbosity() < -1:
            return
        terminalreporter.write_sep("-", "acceptance")
        for line in promise_lines(results, _explained, terminalreporter._tw.fullwidth):
            terminalreporter.write_line(line)
        if path is not None:
            terminalreporter.write_line(f"promises of this run: {path}")

    def _kept(self, results: list[PromiseResult]) -> Path | None:
        path = benchmark.cache_file(self._config, "acceptance.json", "promises")
        if path is not None:
            document = {"format": 1, "promises": results}
            benchmark.write_whole(path, msgspec.json.format(msgspec.json.encode(document), indent=1))
        return path


def _told(text: str) -> str:
    """Return what a failure says, without what its report shows: pytest's view of an assertion, tracebacks, logs."""
    kept: list[str] = []
    for line in text.splitlines():
        if kept and line.lstrip().startswith(("assert ", "+  where", "---")):
            break
        kept.append(line)
    return "\n".join(kept)


def _explained(known: str) -> tuple[str, str, str]:
    behaviour = KNOWN[known]
    return behaviour.does, behaviour.means, behaviour.advice


def _sentence(item: pytest.Item) -> str:
    name: str = getattr(item, "originalname", None) or item.name
    own = [str(value) for key, value in params_of(item).items() if not key.startswith("ckpt_")]
    return ": ".join([name.removeprefix("test_").replace("_", " "), *own])


def _scenario(item: pytest.Item) -> str:
    params = params_of(item)
    config_writers = item.config.stash.get(_WRITERS, ())
    parts = []
    for name in _DIMENSIONS:
        value = params.get(name)
        if value is None:
            continue
        if name == "ckpt_world":
            parts.append(f"r{value}")
        elif name == "ckpt_writer" and isinstance(value, int):
            parts.append(config_writers[value] or "default")
        else:
            parts.append(str(value))
    return "-".join(parts) or "default"


_WRITERS: pytest.StashKey[tuple[str, ...]] = pytest.StashKey()


def _reason(report: pytest.TestReport) -> str:
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return told.removeprefix("Skipped: ")


def register(config: pytest.Config, run: Run) -> None:
    """Register `Promises` for the session."""
    config.stash[_WRITERS] = tuple(writer.label for writer in run.settings.writers)
    config.pluginmanager.register(Promises(config, run), "ckpt-promises")


class Following:
    """Registered on the ranks above 0 of an attached world: rank 0 runs the tests, draws the states and compares."""

    def __init__(self, follow: Follow) -> None:
        self._follow = follow

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Do what rank 0 says until its test has ended."""
        if FIXTURE not in pyfuncitem.fixturenames:
            return None
        self._follow.collective(_CALL)
        return True
