"""One session that saves: what was selected, whether it fits, its worlds and folders, and what came of it."""

from __future__ import annotations

import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

import pytest

import pytest_ckpt
from pytest_ckpt.errors import SettingError
from pytest_ckpt.plugin import benchmark as bridge
from pytest_ckpt.plugin import plan
from pytest_ckpt.plugin.settings import ModelSpec, Settings, WriterSpec
from pytest_ckpt.plugin.terminal import TerminalProgress
from pytest_ckpt.records import Environment, SaveRecord, Scenario, TargetRecord
from pytest_ckpt.report.table import summary_lines
from pytest_ckpt.target.interface import Target, WorkFolder
from pytest_ckpt.target.path import open_target
from pytest_ckpt.target.spec import TargetSpec
from pytest_ckpt.world.interface import RankFailure, World
from pytest_ckpt.world.rounds import Measured, RoundsPlan, Saving, measure_rounds
from pytest_ckpt.world.spawned import SpawnedWorld


@dataclass(frozen=True)
class SaveRequest:
    """One call of `ckpt_save`, with everything resolved."""

    target: Target
    model: ModelSpec
    world: World
    mode: str
    writer: WriterSpec
    title: str


@dataclass
class Run:
    """Registered as a plugin of its own once tests that save were selected; owns worlds and work folders."""

    config: pytest.Config
    settings: Settings
    items: list[pytest.Item] = field(default_factory=list)
    rows: list[tuple[str | None, SaveRecord]] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    usage_errors: int = 0

    def __post_init__(self) -> None:
        self._targets: dict[str, Target] = {}
        self._folders: dict[str, WorkFolder] = {}
        self._world: SpawnedWorld | None = None
        self._result_file: bridge.ResultFile | None = None
        self._began = time.monotonic()
        self._failed_folders: set[str] = set()
        self._warnings: list[str] = []

    # What was selected, before anything runs

    def target(self, label: str | None = None) -> Target:
        """Return the target called `label`, or the first; resolved once."""
        specs = self.settings.targets or (self._default_target(),)
        spec = next((s for s in specs if s.label == label), specs[0])
        if spec.label not in self._targets:
            self._targets[spec.label] = open_target(spec)
        return self._targets[spec.label]

    def _default_target(self) -> TargetSpec:
        root = self.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        return TargetSpec("local", str(root), str(root), "the default")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Refuse what cannot work before anything is written: targets, space, memory."""
        self.items = [item for item in session.items if item in self.items and not item.get_closest_marker("skip")]
        needs = [plan.Need.of_item(item, self) for item in self.items]
        for label in dict.fromkeys(need.target.label for need in needs):
            self._warnings += self.target(label).check()
        try:
            for need in needs:
                need.check()
        except SettingError as error:
            raise pytest.UsageError(str(error)) from error

    def pytest_report_collectionfinish(self) -> list[str]:
        """Print what was chosen and why."""
        if self.config.get_verbosity() < 0 or not self.items:
            return []
        needs = [plan.Need.of_item(item, self) for item in self.items]
        return plan.header_lines(self, needs) + [f"ckpt: warning: {w}" for w in dict.fromkeys(self._warnings)]

    # The tests run

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
        """Open the work folders, run the tests, and leave nothing behind however they end."""
        if session.config.option.collectonly or not self.items:
            return (yield)
        self._began = time.monotonic()
        with _sigterm_ends_the_session():
            try:
                self._result_file = bridge.ResultFile(self.config)
                for item in self.items:
                    self.folder(plan.target_of(item, self))
                return (yield)
            except SettingError as error:
                raise pytest.UsageError(str(error)) from error
            finally:
                self.close()

    def folder(self, target: Target) -> WorkFolder:
        """Return this run's work folder on `target`; the first time it is made, after trying what a save needs."""
        if target.label not in self._folders:
            self._folders[target.label] = target.open()
        return self._folders[target.label]

    def world(self, size: int) -> SpawnedWorld:
        """Return the world of `size` ranks; one of another size is closed first, so that memory is never held twice."""
        if self._world is None or self._world.size != size:
            if self._world is not None:
                self._world.close()
            self._world = SpawnedWorld(size, self.settings.device, self.settings.timeout_s)
        return self._world

    def save(self, request: SaveRequest) -> SaveRecord:
        """Measure one scenario; failed rounds of the ranks end the test with their report."""
        settings = self.settings
        folder = self.folder(request.target)
        began = datetime.now(timezone.utc)
        try:
            measured = measure_rounds(
                request.world,
                folder,
                Saving(
                    mode=request.mode,
                    writer=request.writer.factory,
                    model=request.model.name,
                    state=request.model.recipe.name,
                    function=request.model.function,
                ),
                RoundsPlan(
                    rounds=settings.rounds,
                    max_time_s=min(settings.max_time_s, self._session_time_left_s()),
                    single=not _benchmark_enabled(self.config),
                    keep_all=settings.keep == "all",
                    keep_failed=settings.keep == "failed",
                ),
                TerminalProgress(self.config, request.title, folder.bytes_in),
            )
        except RankFailure as failure:
            self._failed_folders.add(request.target.label)
            raise pytest.fail.Exception(
                f"{request.title}: {failure}\n{plan.space_line(request.target)}", pytrace=False
            ) from None
        return self._record(request, measured, began)

    def note(self, name: str | None, record: SaveRecord) -> None:
        """Keep a finished scenario for the table, and in the file of the last run."""
        self.rows.append((name, record))
        if self._result_file is not None:
            self._result_file.write()

    def close(self) -> None:
        """End the ranks, then remove or keep the work folders."""
        if self._world is not None:
            self._world.close()
            self._world = None
        for label, folder in self._folders.items():
            keep = self.settings.keep == "all" or (self.settings.keep == "failed" and label in self._failed_folders)
            kept = folder.close(keep=keep)
            if kept:
                self.kept.append(kept)
        self._folders.clear()

    def _session_time_left_s(self) -> float:
        if self.settings.session_time_s is None:
            return float("inf")
        return self.settings.session_time_s - (time.monotonic() - self._began)

    def _record(self, request: SaveRequest, measured: Measured, began: datetime) -> SaveRecord:
        target = request.target
        return SaveRecord(
            scenario=Scenario(
                engine="dcp",
                mode=request.mode,
                writer=request.writer.name,
                options={},
                model=request.model.name,
                state=request.model.recipe.name if request.model.function is None else "user",
                params=request.model.parameters,
                world_size=request.world.size,
                mesh=f"shard={request.world.size}",
                device=request.world.device,
            ),
            environment=environment(),
            host=socket.gethostname(),
            time=began.isoformat(),
            target=TargetRecord(
                label=target.label,
                kind=target.kind,
                medium=target.medium,
                mount=target.mount,
                filesystem=target.filesystem,
            ),
            logical_bytes=measured.logical_bytes,
            stored_bytes=measured.stored_bytes,
            folder_bytes=measured.folder_bytes,
            rounds=measured.rounds,
            first_save_s=measured.first_save.save_s,
            notes=measured.notes,
        )

    # What came of it

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A call that could not be used is the user's error, whatever else passed: exit status 4."""
        if self.usage_errors and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the table, what was kept, and where the figures are."""
        if not self.rows and not self.kept:
            return
        if self.rows and self.config.get_verbosity() >= -1:
            terminalreporter.section("checkpoint saves", sep="-")
            for line in summary_lines(self.rows, terminalreporter._tw.fullwidth):
                terminalreporter.write_line(line)
            for name, record in self.rows:
                for note in record.notes:
                    terminalreporter.write_line(f"{name or record.scenario.mode}: {note}")
        for path in self.kept:
            terminalreporter.write_line(f"kept: {path}")
        if self._result_file is not None and self._result_file.path is not None and self.rows:
            terminalreporter.write_line(f"figures of this run: {self._result_file.path}")


def environment() -> Environment:
    """Return the software that makes the figures."""
    return Environment(
        torch=version("torch"),
        driver=None,
        kernel=platform.release(),
        plugin=pytest_ckpt.__version__,
        python=platform.python_version(),
    )


def _benchmark_enabled(config: pytest.Config) -> bool:
    return not config._benchmarksession.disabled  # type: ignore[attr-defined]


@contextmanager
def _sigterm_ends_the_session() -> Iterator[None]:
    """Let SIGTERM end the session as Ctrl-C does, so that ranks and folders go; a handler of the user's stays."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def handle(number: int, frame: object) -> None:
        raise KeyboardInterrupt(f"terminated by SIGTERM (pid {os.getpid()})")

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
