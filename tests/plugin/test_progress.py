"""Progress while a save runs: a line that rewrites itself on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import os
import pty
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_ckpt.plugin.terminal import TerminalProgress

from .project import SUITE, Project


class FakeReporter:
    """Stands for pytest's terminal reporter where nobody watches."""

    isatty = False
    hasmarkup = False

    def __init__(self) -> None:
        self.lines: list[str] = []

    def ensure_newline(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def write_line(self, line: str) -> None:
        self.lines.append(line)


class FakeConfig:
    """Holds what a progress asks a config for."""

    def __init__(self, reporter: FakeReporter | None, verbosity: int = 0) -> None:
        self.reporter, self.verbosity = reporter, verbosity
        self.pluginmanager = self

    def getplugin(self, name: str) -> FakeReporter | None:
        return self.reporter if name == "terminalreporter" else None

    def get_verbosity(self) -> int:
        return self.verbosity


def progress(config: Any, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> TerminalProgress:
    monkeypatch.setattr("pytest_ckpt.plugin.terminal.time.monotonic", lambda: clock[0])
    return TerminalProgress(config, "test_save[x]", lambda location: 25_000_000)


def test_a_plain_line_comes_now_and_then_with_bytes_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    reporter, clock = FakeReporter(), [100.0]
    shown = progress(FakeConfig(reporter), clock, monkeypatch)
    shown.step("round 2 of 5", "somewhere", 100_000_000)
    for _ in range(70):
        clock[0] += 0.5
        shown.poll()
    shown.done()
    assert reporter.lines == ["ckpt test_save[x]: round 2 of 5, 25.0 MB of 100 MB, 833 kB/s, about 90.0 s left, 30.0 s"]


@pytest.mark.parametrize("config", [FakeConfig(FakeReporter(), -1), FakeConfig(None)])
def test_nothing_is_shown_when_quiet_or_without_a_reporter(config: FakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    shown = progress(config, clock, monkeypatch)
    shown.step("round 1 of 5", "somewhere", 100)
    clock[0] = 1000
    shown.poll()
    shown.done()
    assert config.reporter is None or config.reporter.lines == []


@pytest.mark.long
def test_on_a_terminal_the_line_rewrites_itself(project: Project, tmp_path: Path) -> None:
    written = bytearray()

    def read(descriptor: int) -> bytes:
        chunk = os.read(descriptor, 4096)
        written.extend(chunk)
        return chunk

    arguments = [
        sys.executable,
        "-m",
        "pytest",
        *SUITE,
        "--ckpt-mode=sync",
        "--ckpt-rounds=1",
        "--rootdir",
        str(tmp_path),
    ]
    environment = f"TERM=xterm TMPDIR={project.temporary} COLUMNS=150"
    status = pty.spawn(["env", *environment.split(), *arguments, f"--ckpt-target={project.target}"], read)
    text = written.decode(errors="replace")
    assert os.waitstatus_to_exitcode(status) == 0, text
    assert re.search(r"\rckpt test_save\[disk-llama3-debug-r2-sync\]: making the state, [^\n]*\r", text)
    assert re.search(r"1 passed", text)
    assert project.in_target() == []
