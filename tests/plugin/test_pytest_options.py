"""Beside pytest's, pytest-benchmark's and other plugins' own options: each row of the documented table, proved."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from xml.etree import ElementTree

import pytest

from .project import SAVING_TEST, SUITE, Project, Result

TABLE = Path(__file__).parents[2] / "docs/reference/pytest-options.md"


PROVED: set[str] = set()
Test = TypeVar("Test", bound=Callable[..., None])


def row(*options: str) -> Callable[[Test], Test]:
    """Note that the decorated test proves the table's rows for `options`."""
    PROVED.update(options)
    return lambda test: test


@pytest.fixture(scope="module")
def first(module_project: Project) -> tuple[Project, Result]:
    """A run that saves its figures in every way pytest-benchmark has."""
    options = ("--benchmark-save=first", "--benchmark-json=run.json", "--junitxml=junit.xml", "-q")
    return module_project, module_project.pytest(*SUITE, *options).require(0)


@pytest.fixture(scope="module")
def second(first: tuple[Project, Result]) -> tuple[Project, Result]:
    """A run that compares itself with figures a thousand times faster."""
    project, _ = first
    (saved,) = project.path.glob(".benchmarks/*/0001_first.json")
    figures = json.loads(saved.read_text())
    for benchmark in figures["benchmarks"]:
        for name, value in benchmark["stats"].items():
            if isinstance(value, float):
                benchmark["stats"][name] = value / 1000
    saved.write_text(json.dumps(figures))
    options = ("--benchmark-autosave", "--benchmark-compare=0001", "--benchmark-compare-fail=median:5%")
    ignored = ("--benchmark-min-rounds=7", "--benchmark-max-time=2", "--benchmark-warmup=on")
    return project, project.pytest(*SUITE, *options, *ignored, "-p", "no:cacheprovider")


@row("--benchmark-save", "--benchmark-json")
def test_saved_figures_hold_a_row_for_each_save_and_each_stall(first: tuple[Project, Result]) -> None:
    project, _ = first
    (saved,) = project.path.glob(".benchmarks/*/0001_first.json")
    for file in (saved, project.path / "run.json"):
        names = [benchmark["name"] for benchmark in json.loads(file.read_text())["benchmarks"]]
        assert [name.rpartition("-")[2] for name in names] == ["sync]", "async]", "async]:stall"]


@row("--junitxml")
def test_junit_has_a_case_for_each_scenario(first: tuple[Project, Result]) -> None:
    suite = ElementTree.parse(first[0].path / "junit.xml").getroot()[0]
    assert [suite.get(key) for key in ("tests", "failures", "errors", "skipped")] == ["2", "0", "0", "0"]


@row("-q")
def test_quiet_keeps_the_table_and_drops_header_and_path(first: tuple[Project, Result]) -> None:
    first[1].lines.fnmatch_lines(["target * stall *", "disk *", "disk *"])
    for line in ("ckpt:*", "figures*", "*checkpoint saves*", "*StdDev*"):
        first[1].lines.no_fnmatch_line(line)


@row("--benchmark-autosave", "--benchmark-compare", "pytest-benchmark compare")
def test_compare_shows_both_runs_for_save_and_stall(second: tuple[Project, Result]) -> None:
    project, result = second
    result.lines.fnmatch_lines(
        [
            "*- benchmark 'save': 4 tests -*",
            "test_save?disk-llama3-tiny-r2-async? (0001_first)*",
            "*'stall': 2 tests -*",
        ]
    )
    compared = project.run("pytest-benchmark", "compare", "--columns=median").require(0)
    for name in ("test_save[disk-llama3-tiny-r2-sync]", "test_save[disk-llama3-tiny-r2-async]", "async]:stall"):
        assert len([line for line in compared.out.splitlines() if f"{name} (" in line]) == 2, compared.out


@row("--benchmark-compare-fail")
def test_compare_fail_ends_the_run_with_a_failure(second: tuple[Project, Result]) -> None:
    assert second[1].require(second[1].status).status != 0
    assert "Performance has regressed" in second[1].out


@row("--benchmark-min-rounds", "--benchmark-max-time", "--benchmark-warmup")
def test_options_that_saves_do_not_heed_bring_a_warning_that_names_ours(second: tuple[Project, Result]) -> None:
    second[1].lines.fnmatch_lines(
        [
            "ckpt: warning: --benchmark-min-rounds does not change checkpoint saves: use --ckpt-rounds",
            "ckpt: warning: --benchmark-max-time does not change checkpoint saves: use --ckpt-max-time",
            "ckpt: warning: --benchmark-warmup does not change checkpoint saves:*one warm-up save is always made*",
        ]
    )
    assert not re.search(r"disk .* sync +7 ", second[1].out)


@row("-p no:cacheprovider")
def test_without_a_cache_no_last_run_is_kept(second: tuple[Project, Result]) -> None:
    second[1].lines.no_fnmatch_line("figures of this run*")


@row("--benchmark-disable", "-p no:terminal")
def test_benchmark_disable_makes_one_save_and_no_row(project: Project) -> None:
    options = ("--benchmark-disable", "--benchmark-json=run.json", "--ckpt-keep=all", "-p", "no:terminal")
    result = project.pytest(*SUITE, "--ckpt-mode=sync", *options)
    assert (result.status, result.out) == (0, "")
    (kept,) = project.target.iterdir()
    assert [folder.name for folder in kept.iterdir() if folder.is_dir()] == ["0001-llama3-tiny-sync"]
    assert not (project.path / "run.json").exists()
    assert not (project.path / ".pytest_cache/d/ckpt").exists()


@row("--benchmark-skip")
def test_benchmark_skip_skips_saves_and_writes_nothing(project: Project) -> None:
    project.write("test_other.py", "def test_other():\n    pass\n")
    result = project.pytest(*SUITE, "test_other.py", "--benchmark-skip").require(0)
    result.lines.fnmatch_lines(["*1 passed, 2 skipped*"])


@row("--benchmark-only", "-k", "-m", "--benchmark-columns")
@pytest.mark.long
def test_selections_run_what_they_select(project: Project) -> None:
    project.write("test_other.py", "def test_other():\n    pass\n")
    project.write("test_it.py", "import pytest\npytestmark = pytest.mark.ckpt_save\n" + SAVING_TEST)
    result = project.pytest(
        "--benchmark-only", "--benchmark-columns=median", "-k", "sync and not async or other"
    ).require(0)
    result.lines.fnmatch_lines(["Name (time in ms) * Median*", "test_save?disk-llama3-tiny-r2-sync? *"])
    result.lines.fnmatch_lines(["*1 passed, 1 skipped, 1 deselected*"])
    assert [benchmark["name"] for benchmark in project.last()["benchmarks"]] == ["test_save[disk-llama3-tiny-r2-sync]"]
    project.pytest("-m", "ckpt_save", "--co", "-q").require(0).lines.fnmatch_lines(["2/3 tests collected*"])


@row("-p no:benchmark")
def test_without_pytest_benchmark_saves_are_refused(project: Project) -> None:
    result = project.pytest(*SUITE, "-p", "no:benchmark").require(4)
    result.lines.fnmatch_lines(["ERROR: tests that save need pytest-benchmark*-p no:benchmark*run without that option"])


@row("-n")
def test_under_xdist_saves_are_skipped_with_the_reason(project: Project) -> None:
    project.write("test_other.py", "def test_other():\n    pass\n")
    result = project.pytest(*SUITE, "test_other.py", "-n2", "-rs").require(0)
    result.lines.fnmatch_lines(
        [
            "ckpt: checkpoint saves are skipped: pytest-xdist is active*run without -n",
            "ckpt: 2 tests were skipped: pytest-xdist is active*",
            "*SKIPPED*pytest-xdist is active*run without -n",
            "*1 passed, 2 skipped*",
        ]
    )


@row("--codspeed")
def test_under_codspeed_saves_are_skipped_with_the_reason(project: Project) -> None:
    project.write(
        "conftest.py",
        """
class Codspeed:
    is_codspeed_enabled = True

def pytest_configure(config):
    config.pluginmanager.register(Codspeed(), "codspeed_plugin")
""",
    )
    result = project.pytest(*SUITE).require(0)
    result.lines.fnmatch_lines(["ckpt: 2 tests were skipped: pytest-codspeed is active*", "*2 skipped*"])


@row("-x", "--lf")
@pytest.mark.long
def test_stopping_at_the_first_failure_and_running_it_again_start_no_world_for_the_others(project: Project) -> None:
    project.write(
        "test_it.py",
        """
def test_fails(ckpt_save):
    assert False

def test_saves(ckpt_save):
    ckpt_save(mode="sync")
""",
    )
    project.pytest("-x").require(1).lines.fnmatch_lines(["*1 failed*"])
    again = project.pytest("--lf").require(1)
    again.lines.fnmatch_lines(["*= 1 failed in *"])
    again.lines.no_fnmatch_line("*checkpoint saves*")


@row("--collect-only")
def test_collecting_shows_the_plan_and_writes_nothing(project: Project) -> None:
    result = project.pytest(*SUITE, "--co").require(0)
    result.lines.fnmatch_lines(["ckpt: target disk = *", "*test_save?disk-llama3-tiny-r2-sync?*"])
    project.pytest(*SUITE, "--co", target=False).require(0)
    assert list(project.temporary.iterdir()) == []


@row("--setup-plan")
def test_a_setup_plan_writes_nothing(project: Project) -> None:
    project.pytest(*SUITE, "--setup-plan").require(0).lines.fnmatch_lines(["*SETUP*F ckpt_save*"])


HANGS = """
import time
import pytest
from torch.distributed.checkpoint.filesystem import FileSystemWriter

class Hanging(FileSystemWriter):
    def write_data(self, plan, planner):
        open("saving", "w").close()
        time.sleep(600)

def hanging(path):
    return Hanging(path)

def nothing(rank):
    pass

@pytest.mark.timeout(200)
def test_starts_the_world(request):
    request.getfixturevalue("ckpt_world").run(nothing)

def test_hangs(ckpt_save):
    ckpt_save(mode="sync", writer=hanging)

def test_passes():
    pass
"""


@row("--timeout")
@pytest.mark.long
def test_pytest_timeout_ends_a_save_and_the_next_test_runs(project: Project) -> None:
    project.write("test_it.py", HANGS)
    result = project.pytest("--timeout=8", "--timeout-method=signal").require(1)
    result.lines.fnmatch_lines(["*Timeout*", "*1 failed, 2 passed*"])
    assert (project.path / "saving").exists()


@row("--reruns", "-qq")
@pytest.mark.long
def test_a_rerun_replaces_the_row_of_the_first_try(project: Project) -> None:
    project.write(
        "test_it.py",
        """
tries = []

def test_second_try(ckpt_save):
    ckpt_save(mode="async")
    tries.append(1)
    assert len(tries) == 2
""",
    )
    result = project.pytest("--reruns=1", "-qq", "--benchmark-json=run.json").require(0)
    for line in ("ckpt*", "target *", "disk *", "figures*"):
        result.lines.no_fnmatch_line(line)
    benchmarks = json.loads((project.path / "run.json").read_text())["benchmarks"]
    assert [benchmark["name"] for benchmark in benchmarks] == ["test_second_try", "test_second_try:stall"]


@row("-v")
@pytest.mark.long
def test_the_wide_table_comes_when_it_is_asked_for(project: Project) -> None:
    result = project.pytest(*SUITE, "--ckpt-mode=sync", "--ckpt-rounds=1", "-v").require(0)
    result.lines.fnmatch_lines(["*test_save?disk-llama3-tiny-r2-sync? PASSED*", "*- benchmark 'save': 1 tests -*"])


def test_each_row_of_the_documented_table_is_proved_here() -> None:
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    documented = {option for line in rows for option in re.findall(r"`([^`]+)`", line.split("|")[1])}
    assert documented == PROVED
