"""The command `pytest-ckpt`, as a person without a checkout types it."""

from __future__ import annotations

from .project import TINY, Project


def test_run_benchmarks_the_packaged_suite_in_a_target(project: Project) -> None:
    result = project.run("pytest-ckpt", "run", project.target, TINY, "--ckpt-rounds=1", "-k", "sync and not async")
    result.require(0).lines.fnmatch_lines(
        ["ckpt: target disk = *", "disk * llama3-tiny * 2 * sync * 1 *", "*1 passed*"]
    )


def test_run_refuses_what_pytest_refuses(project: Project) -> None:
    result = project.run("pytest-ckpt", "run", project.target, "--ckpt-ranks=0").require(4)
    result.lines.fnmatch_lines(["ERROR: '0' (from --ckpt-ranks)*"])


def test_clean_removes_nothing_from_a_folder_of_others(project: Project) -> None:
    (project.target / "pytest-ckpt-abcdefgh").mkdir()
    result = project.run("pytest-ckpt", "clean", project.target)
    assert (result.status, result.in_target) == (0, ["pytest-ckpt-abcdefgh"])
    result.lines.fnmatch_lines(
        ["left * unreadable-marker): it holds no marker file", "0 removed, 0 B freed, 1 left in *"]
    )


def test_clean_refuses_a_target_that_is_not_there(project: Project) -> None:
    result = project.run("pytest-ckpt", "clean", project.path / "missing").require(4)
    result.lines.fnmatch_lines(["pytest-ckpt: target *missing' (from pytest-ckpt clean) cannot be used*"])


def test_unknown_arguments_are_refused(project: Project) -> None:
    project.run("pytest-ckpt", "clean", project.target, "--everything").require(2)
    project.run("pytest-ckpt").require(2)
