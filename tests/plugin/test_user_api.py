"""What users write themselves: own tests, writers, models and functions, with public fixtures only."""

from __future__ import annotations

import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from .project import SAVING_TEST, SUITE, Project, Result
from .writers import WRITERS


@pytest.fixture(scope="module")
def own(module_project: Project) -> tuple[Project, Result]:
    """A project with tests of its own, collected as `--import-mode=importlib` does."""
    project = module_project
    project.write("writers.py", WRITERS)
    project.write(
        "state.py", "import torch\ndef make(mesh, device):\n    return {'w': torch.ones(1000 * mesh.size())}\n"
    )
    project.write(
        "test_writer.py",
        """
from torch.distributed.checkpoint.filesystem import FileSystemWriter

def my_writer(path):
    return FileSystemWriter(path, thread_count=2)

def test_my_writer(ckpt_save, ckpt_world, ckpt_target, ckpt_model):
    result = ckpt_save(mode="async", writer=my_writer)
    assert 0 < result.stall_s < 60
    assert len(result.rounds) == 2

def test_named(ckpt_save):
    first = ckpt_save(mode="sync", name="one")
    assert first.scenario.writer == "FileSystemWriter"
    ckpt_save(mode="sync", name="two", writer=my_writer)

def test_model_of_a_call(ckpt_save):
    assert ckpt_save(mode="sync", model="state:make").logical_bytes == 8000
""",
    )
    project.write(
        "test_model.py",
        """
import os
import pytest
import torch

def my_state(mesh, device):
    return {"mine": torch.ones(2**18, device=device), "step": 3}

@pytest.fixture
def ckpt_model():
    return my_state

def test_my_model(ckpt_save, ckpt_model):
    assert ckpt_save(mode="sync").logical_bytes == 2**20

def places(rank, base):
    return [rank.rank + base, rank.size, os.environ["WORLD_SIZE"]]

def test_function(ckpt_world):
    assert ckpt_world.run(places, base=10) == [[10, 2, "2"], [11, 2, "2"]]

@pytest.mark.parametrize("ckpt_mode", ["async"])
def test_direct_mode(ckpt_save, ckpt_mode):
    assert ckpt_save().scenario.mode == "async"
""",
    )
    options = ("--import-mode=importlib", "--benchmark-json=run.json", "-v", "-W", "error::DeprecationWarning")
    return project, project.pytest("test_model.py", "test_writer.py", *options).require(0)


@pytest.fixture(scope="module")
def rows(own: tuple[Project, Result]) -> dict[str, Any]:
    return {row["name"]: row for row in json.loads((own[0].path / "run.json").read_text())["benchmarks"]}


def test_dimensions_are_parametrized_only_where_they_are_requested(own: tuple[Project, Result]) -> None:
    names = re.findall(r"^test_\w+\.py::(\S+) PASSED", own[1].out, re.M)
    assert sorted(names) == [
        "test_direct_mode[async]",
        "test_function[r2]",
        "test_model_of_a_call",
        "test_my_model",
        "test_my_writer[disk-llama3-tiny-r2]",
        "test_named",
    ]


def test_a_writer_is_recorded_by_its_name(rows: dict[str, Any]) -> None:
    ckpt = rows["test_my_writer[disk-llama3-tiny-r2]"]["extra_info"]["ckpt"]
    assert ckpt["scenario"]["writer"] == "test_writer:my_writer"
    assert "test_my_writer[disk-llama3-tiny-r2]:stall" in rows


def test_each_named_call_is_a_row(rows: dict[str, Any], own: tuple[Project, Result]) -> None:
    assert {"test_named:one", "test_named:two"} <= set(rows)
    own[1].lines.fnmatch_lines(["name * target * model *", "test_named: one * disk *", "test_named: two * disk *"])


def test_a_model_is_recorded_by_its_name(rows: dict[str, Any], own: tuple[Project, Result]) -> None:
    scenario = rows["test_my_model"]["extra_info"]["ckpt"]["scenario"]
    assert (scenario["model"], scenario["state"], scenario["params"]) == ("test_model.my_state", "user", None)
    own[1].lines.fnmatch_lines(["ckpt: model of the test's own: its size is known once it is made"])


@pytest.mark.long
def test_models_by_option_and_several_targets_and_ranks_make_each_world_once(project: Project) -> None:
    project.write("state.py", "import torch\ndef make(mesh, device):\n    return {'w': torch.ones(1000)}\n")
    project.write(
        "test_it.py",
        SAVING_TEST
        + """
def pid(rank):
    import os
    return os.getpid()

def test_pids(ckpt_world, ckpt_target):
    print("world", ckpt_world.run(pid))
""",
    )
    second = project.path / "second"
    second.mkdir()
    result = project.run(
        *("python", "-m", "pytest", "-s", "--ckpt-model=state:make", "--ckpt-rounds=2", "--ckpt-mode=sync"),
        *("--ckpt-ranks=2", "--ckpt-ranks=1", f"--ckpt-target={project.target}", f"--ckpt-target=b={second}"),
        *("--junitxml=junit.xml", "--benchmark-json=run.json"),
    ).require(0)
    names = [case.get("name", "") for case in ElementTree.parse(project.path / "junit.xml").iter("testcase")]
    sizes = [match[1] for name in names if (match := re.search(r"-?(r\d)", name))]
    assert sizes == ["r2"] * 4 + ["r1"] * 4
    assert "test_save[b-state.make-r2-sync]" in names
    assert len(set(re.findall(r"world \[(.*)\]", result.out))) == 2
    assert list(second.iterdir()) == []
    assert min(overhead_s(project, f"test_save[b-state.make-r{ranks}-sync]") for ranks in (1, 2)) < 1


def overhead_s(project: Project, name: str) -> float:
    """Return the seconds of a test beyond those of its saves."""
    cases = {case.get("name"): case for case in ElementTree.parse(project.path / "junit.xml").iter("testcase")}
    rows = {row["name"]: row for row in json.loads((project.path / "run.json").read_text())["benchmarks"]}
    ckpt = rows[name]["extra_info"]["ckpt"]
    saves_s: float = ckpt["first_save_s"] + sum(round_["save_s"] for round_ in ckpt["rounds"])
    return float(cases[name].get("time") or "nan") - saves_s


@pytest.mark.long
def test_several_models_are_made_once_in_each_world(project: Project) -> None:
    options = ("--ckpt-model=moe-debug", "--ckpt-ranks=2", "--ckpt-ranks=1", "--ckpt-target=b=/tmp", "--ckpt-mode=sync")
    result = project.pytest(*SUITE, *options, "--co", "-q").require(0)
    assert re.findall(r"test_save\[(.*)-sync\]", result.out) == [
        *("disk-llama3-tiny-r2", "b-llama3-tiny-r2", "disk-moe-debug-r2", "b-moe-debug-r2"),
        *("disk-llama3-tiny-r1", "b-llama3-tiny-r1", "disk-moe-debug-r1", "b-moe-debug-r1"),
    ]


def test_a_foreign_benchmark_fixture_is_refused_by_name(project: Project) -> None:
    project.write("test_it.py", "import pytest\n\n@pytest.fixture\ndef benchmark():\n    return 7\n" + SAVING_TEST)
    result = project.pytest("--ckpt-mode=sync").require(1)
    result.lines.fnmatch_lines(["the fixture `benchmark` is overridden and gives 'int'*rename the other fixture"])


@pytest.mark.long
def test_too_little_time_fails_with_the_figures(project: Project) -> None:
    result = project.pytest(*SUITE, "--ckpt-mode=sync", "--ckpt-rounds=5", "--ckpt-max-time=1ms").require(1)
    result.lines.fnmatch_lines(
        ["too slow for the time allowed: the warm-up save took * so 4 rounds *allowed are 1.00 ms*"]
    )
    result = project.pytest(*SUITE, "--ckpt-mode=sync", "--ckpt-session-time=1ms").require(1)
    result.lines.fnmatch_lines(["too slow for the time allowed: the 1.00 ms of --ckpt-session-time had passed *"])
