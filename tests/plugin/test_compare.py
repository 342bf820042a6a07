"""`--benchmark-compare` without a name: pytest-benchmark's table of this run beside this hardware's newest baseline."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_ckpt.measure.hardware import find_hardware
from pytest_ckpt.measure.hardware_id import hardware_id
from pytest_ckpt.target.identity import identify

from .project import SUITE, Project, Result
from .stored import FAST, SLOW, as_saved, files, night, store, write_own

SHM = Path("/dev/shm")
PLAIN = "def test_plain(benchmark):\n    benchmark.pedantic(lambda: None, rounds=3)\n"
COMPARE = "--benchmark-compare"


@dataclass
class Compared:
    project: Project
    result: Result


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """A run that compares itself with what the run before it saved: two targets of one disk, and one in memory."""
    if not os.access(SHM, os.W_OK):
        pytest.skip("there is no /dev/shm here")
    project = Project(tmp_path_factory.mktemp("project"))
    write_own(project)
    memory = SHM / f"{project.path.parent.name}-{project.path.name}-{os.getpid()}"
    memory.mkdir()
    try:
        targets = (f"--ckpt-target=twin={project.target}", f"--ckpt-target=memory={memory}", "--ckpt-mode=sync")
        saved = night(project, *SUITE, *targets, "--ckpt-baseline=save", hardware=None).require(0)
        assert saved.out.count("baseline saved: ") == 3
        elsewhere = f"--benchmark-storage=file://{project.path / 'elsewhere'}"
        options = (COMPARE, elsewhere, "--benchmark-columns=median,rounds", "--ckpt-baseline=off")
        result = night(project, *SUITE, *targets, *options, hardware=None)
    finally:
        shutil.rmtree(memory)
    return Compared(project, result)


def beside(result: Result, label: str) -> list[str]:
    """Return which figures stand in the table for the saves into a target."""
    start = f"test_save[{label}-own.small-r1-sync] ("
    sources = [line.removeprefix(start) for line in result.out.splitlines() if line.startswith(start)]
    return sorted(re.findall(r"\d{4}(?=_)|NOW", " ".join(sources)))


def test_newest_of_each_hardware_stands_beside_this_run(compared: Compared) -> None:
    compared.result.require(0)
    assert beside(compared.result, "memory") == ["0001", "NOW"]
    assert beside(compared.result, "twin") == ["0002", "NOW"]
    assert files(compared.project.path / "elsewhere") == []


def test_both_targets_of_one_volume_are_shown(compared: Compared) -> None:
    assert beside(compared.result, "disk") == ["0001", "NOW"]


def test_no_warning_of_another_machine_is_given(compared: Compared) -> None:
    assert "machine_info is different" not in compared.result.out
    assert "Can't compare" not in compared.result.out


def of_temporary_files(project: Project) -> str:
    volume = identify(str(project.temporary))
    return hardware_id(find_hardware(), volume.storage_class, volume.filesystem, volume.medium)


def plain(project: Project, *arguments: object) -> Result:
    """Run a benchmark of the user's own, which saves nothing."""
    return project.run(sys.executable, "-m", "pytest", "test_plain.py", *arguments)


@pytest.mark.long
def test_without_a_baseline_it_is_as_pytest_benchmark_has_it(project: Project) -> None:
    project.write("test_plain.py", PLAIN)
    nothing = plain(project, COMPARE).require(0)
    assert "Can't compare. No benchmark files in" in nothing.out
    plain(project, "--benchmark-save=own").require(0)
    own = plain(project, COMPARE, "--benchmark-compare-fail=median:1000000%").require(0)
    own.lines.fnmatch_lines_random(["test_plain (0001_own) *", "test_plain (NOW) *"])
    assert not (project.path / "baselines").exists()


@pytest.mark.long
def test_file_that_is_named_is_the_one_that_is_compared(project: Project) -> None:
    project.write("test_plain.py", PLAIN)
    store(project.path / "baselines", "night1", as_saved(FAST), hardware=of_temporary_files(project))
    plain(project, "--benchmark-save=own").require(0)
    named = plain(project, f"{COMPARE}=0001").require(0)
    named.lines.fnmatch_lines_random(["test_plain (0001_own) *", "test_plain (NOW) *"])


def test_benchmarks_that_save_nothing_are_compared_as_before(project: Project) -> None:
    project.write("test_plain.py", PLAIN)
    store(project.path / "baselines", "night1", as_saved(FAST), hardware=of_temporary_files(project))
    plain(project, "--benchmark-save=own").require(0)
    plain(project, COMPARE).require(0).lines.fnmatch_lines_random(["test_plain (0001_own) *", "test_plain (NOW) *"])


@pytest.mark.long
def test_newest_file_is_the_one_that_is_compared_and_a_damaged_one_is_passed_over(project: Project) -> None:
    project.write("test_plain.py", PLAIN)
    name = of_temporary_files(project)
    store(project.path / "baselines", "night1", as_saved(FAST), hardware=name)
    newest = store(project.path / "baselines", "night2", as_saved(SLOW), hardware=name)
    newest.with_name("0003_cut.json").write_text("{")
    result = plain(project, COMPARE).require(0)
    assert f"Comparing against benchmarks from: {newest}" in result.out
    assert "Failed to load" not in result.out
