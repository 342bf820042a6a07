"""What came of a session: the rows of the table, the file of the last run, and the last lines."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_ckpt.plugin import benchmark
from pytest_ckpt.records import SaveRecord
from pytest_ckpt.report.table import summary_lines


class Outcome:
    """Registered as a plugin beside the `Run` that fills it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._rows: dict[tuple[str, str | None], SaveRecord] = {}
        self._file: benchmark.ResultFile | None = None
        self.kept: list[str] = []
        self.left: list[str] = []
        self.usage_errors = 0

    def note(self, nodeid: str, name: str | None, record: SaveRecord) -> None:
        """Keep a finished scenario for the table, and in the file of the last run; a rerun replaces its row."""
        self._rows.pop((nodeid, name), None)
        self._rows[nodeid, name] = record
        if self._file is None:
            self._file = benchmark.ResultFile(self._config)
        self._file.write()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A call that could not be used is the user's error, whatever else passed: exit status 4."""
        if self.usage_errors and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the table, what was kept or left, and where the figures are."""
        verbosity = self._config.get_verbosity()
        if self._rows and verbosity >= -1:
            if verbosity >= 0:
                terminalreporter.write_sep("-", "checkpoint saves")
            rows = [(name, record) for (_, name), record in self._rows.items()]
            for line in summary_lines(rows, terminalreporter._tw.fullwidth):
                terminalreporter.write_line(line)
            for name, record in rows:
                for note in record.notes:
                    terminalreporter.write_line(f"{name or record.scenario.mode}: {note}")
        for path in self.kept:
            terminalreporter.write_line(f"kept: {path}")
        for path in self.left:
            terminalreporter.write_line(f"could not be removed: {path}; `pytest-ckpt clean` removes it", red=True)
        if self._file is not None and self._file.path is not None and verbosity >= 0:
            terminalreporter.write_line(f"figures of this run: {self._file.path}")
