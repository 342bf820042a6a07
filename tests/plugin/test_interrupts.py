"""Ctrl-C and SIGTERM in the middle of a save end the run within ten seconds and leave only what was asked for."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from .project import SUITE, Project, Result
from .writers import WRITERS


def interrupted(project: Project, send: signal.Signals, *arguments: str) -> Result:
    """Run a save that never ends and signal pytest in the middle of it."""
    project.write("writers.py", WRITERS)
    project.write(
        "test_it.py", "import writers\ndef test_hangs(ckpt_save):\n    ckpt_save(mode='sync', writer=writers.hanging)\n"
    )
    result = project.pytest(*arguments, when=(project.path / "saving").exists, send=send)
    assert result.seconds < 10
    assert (result.status, result.processes) == (pytest.ExitCode.INTERRUPTED, []), result.out
    return result


def test_ctrl_c_ends_a_save_and_leaves_nothing(project: Project) -> None:
    result = interrupted(project, signal.SIGINT)
    result.require(2).lines.fnmatch_lines(["!!* KeyboardInterrupt !*"])


@pytest.mark.parametrize("keep", ["failed", pytest.param("all", marks=pytest.mark.long)])
def test_sigterm_ends_a_save_with_its_name_and_keeps_what_was_asked_for(project: Project, keep: str) -> None:
    result = interrupted(project, signal.SIGTERM, f"--ckpt-keep={keep}")
    (kept,) = project.target.iterdir()
    result.lines.fnmatch_lines([f"kept: {kept}", "!!* KeyboardInterrupt: ended by SIGTERM !*"])
    assert list(kept.glob("*-llama3-tiny-sync/half"))
    project.pytest("--co").lines.no_fnmatch_line("ckpt: left by a killed run*")
    cleaned = project.run("pytest-ckpt", "clean", project.target, "--kept").require(0)
    cleaned.lines.fnmatch_lines([f"removed {kept} (*, kept)"])


def test_two_runs_share_a_target_and_one_that_is_killed_harms_nothing(project: Project, tmp_path: Path) -> None:
    (project.target / "precious").write_text("data")
    (tmp_path / "other").mkdir()
    other = Project(tmp_path / "other")
    seen: list[Result] = []

    def saving() -> bool:
        if (project.path / "saving").exists():
            options = ("--ckpt-mode=sync", "--ckpt-rounds=1", f"--ckpt-target=disk={project.target}")
            seen.append(other.pytest(*SUITE, *options, target=False))
        return bool(seen)

    project.write("writers.py", WRITERS)
    project.write(
        "test_it.py", "import writers\ndef test_hangs(ckpt_save):\n    ckpt_save(mode='sync', writer=writers.hanging)\n"
    )
    killed = project.pytest("--ckpt-keep=all", when=saving, send=signal.SIGKILL)
    assert seen[0].status == 0, seen[0].out
    seen[0].lines.no_fnmatch_line("ckpt: left by*")
    assert killed.processes == []
    (left,) = [name for name in project.in_target() if name != "precious"]
    project.run("pytest-ckpt", "clean", project.target).lines.fnmatch_lines([f"removed *{left} (*, dead)"])
    assert (project.target / "precious").read_text() == "data"
    assert project.in_target() == ["precious"]
