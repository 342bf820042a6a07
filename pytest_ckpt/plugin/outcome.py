"""What came of a session: the rows of the table, the file of the last run, and the last lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pytest_ckpt.errors import CkptError, SettingError
from pytest_ckpt.measure.spans import Span
from pytest_ckpt.plugin import benchmark
from pytest_ckpt.plugin.baselines import Baselines
from pytest_ckpt.records import SaveRecord
from pytest_ckpt.report.chrome import trace_events
from pytest_ckpt.report.explain import explain_lines
from pytest_ckpt.report.table import summary_lines
from pytest_ckpt.world.interface import RankFailure

_KINDS = {"save": "saves", "load": "loads", "plan": "planning"}


class Outcome:
    """Registered as a plugin beside the `Run` that fills it."""

    def __init__(self, config: pytest.Config, baselines: Baselines) -> None:
        self._config = config
        self._baselines = baselines
        self._rows: dict[tuple[str, str | None], SaveRecord] = {}
        self._file: benchmark.ResultFile | None = None
        self.kept: list[str] = []
        self.left: list[str] = []
        self.usage_errors = 0
        self._trace_file: Path | None = None
        self._trace: list[dict[str, Any]] = []
        self._traced = 0

    def open_trace(self, path: str) -> None:
        """Make the file for the spans now, so that a wrong path is found before anything runs."""
        self._trace_file = Path(path)
        try:
            self._write_trace()
        except OSError as error:
            raise SettingError(
                f"--ckpt-trace {path!r} cannot be written: {error.strerror}; write another path"
            ) from None

    def note_spans(self, title: str, rounds: Sequence[Sequence[Sequence[Span]]]) -> None:
        """Add the spans of a scenario's rounds to the trace file, if there is one."""
        if self._trace_file is None:
            return
        self._traced += 1
        by_rank = [
            {rank: [(s.phase, s.start_s, s.end_s) for s in spans] for rank, spans in enumerate(ranks)}
            for ranks in rounds
        ]
        self._trace += trace_events(title, self._traced, by_rank)
        self._write_trace()

    def _write_trace(self) -> None:
        assert self._trace_file is not None
        self._trace_file.write_text(json.dumps({"traceEvents": self._trace, "displayTimeUnit": "ms"}))

    @contextmanager
    def telling(self) -> Iterator[None]:
        """End a test by what its scenario fails with, in its own words; what the user can mend makes exit status 4."""
        try:
            yield
        except CkptError as error:
            told: Exception = error
            if isinstance(error, RankFailure) and error.is_usage:
                told = SettingError(error.culprits[0].cause)
            self.usage_errors += isinstance(told, SettingError)
            raise pytest.fail.Exception(str(told), pytrace=False) from None

    def note(self, nodeid: str, name: str | None, record: SaveRecord) -> None:
        """Keep a finished scenario for the table, and in the file of the last run; a rerun replaces its row."""
        self._rows.pop((nodeid, name), None)
        self._rows[nodeid, name] = record
        if self._file is None:
            self._file = benchmark.ResultFile(self._config)
        self._file.write()

    @property
    def records(self) -> list[SaveRecord]:
        """What was measured in this session by now."""
        return list(self._rows.values())

    def _named_rows(self) -> list[tuple[str | None, SaveRecord]]:
        """Return the rows, each with what tells it from others: its own name, and its test where there are several."""
        tests = {nodeid: nodeid.rpartition("::")[2].partition("[")[0] for nodeid, _ in self._rows}
        several = len(set(tests.values())) > 1
        return [
            (": ".join(part for part in (tests[nodeid] if several else None, name) if part) or None, record)
            for (nodeid, name), record in self._rows.items()
        ]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Save baselines; a call that could not be used is the user's error, whatever else passed: exit status 4."""
        if self._file is not None and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self._baselines.save(self._file.document())
            if self._baselines.failed:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.usage_errors and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the table, what was kept or left, and where the figures are."""
        verbosity = self._config.get_verbosity()
        if self._rows and verbosity >= -1:
            if verbosity >= 0:
                terminalreporter.write_sep("-", f"checkpoint {_kinds(self._rows.values())}")
            rows = self._named_rows()
            for line in summary_lines(rows, terminalreporter._tw.fullwidth):
                terminalreporter.write_line(line)
            for name, record in rows if verbosity >= 0 else ():
                for line in explain_lines(record, name=name, verbose=verbosity > 0):
                    terminalreporter.write_line(line)
            notes = [f"{name or record.scenario.mode}: {note}" for name, record in rows for note in record.notes]
            for note in dict.fromkeys(notes):
                terminalreporter.write_line(note)
        for line in self._baselines.lines:
            terminalreporter.write_line(f"ckpt: {line}", yellow=True)
        for line in self._baselines.saved if verbosity >= -1 else ():
            terminalreporter.write_line(line)
        for line in self._baselines.failed:
            terminalreporter.write_line(line, red=True)
        for path in self.kept:
            terminalreporter.write_line(f"kept: {path}")
        for path in self.left:
            terminalreporter.write_line(f"could not be removed: {path}; `pytest-ckpt clean` may", red=True)
        if self._file is not None and self._file.path is not None and verbosity >= 0:
            terminalreporter.write_line(f"figures of this run: {self._file.path}")


def _kinds(records: Iterable[SaveRecord]) -> str:
    measured = {record.scenario.kind for record in records}
    return " and ".join(words for kind, words in _KINDS.items() if kind in measured)
