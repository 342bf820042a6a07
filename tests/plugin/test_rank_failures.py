"""A rank that fails ends its test with rank, phase and cause; the next test gets a new world; nothing is left."""

from __future__ import annotations

import re

import pytest

from .project import Project, Result
from .writers import WRITERS


@pytest.fixture(scope="module")
def failing(module_project: Project) -> Result:
    module_project.write("writers.py", WRITERS)
    module_project.write(
        "test_it.py",
        """
import os
import writers

def pids(rank):
    return os.getpid()

def test_before(request):
    print("world", request.getfixturevalue("ckpt_world").run(pids))

def test_full(ckpt_save):
    ckpt_save(mode="sync", writer=writers.full)

def test_killed(ckpt_save):
    ckpt_save(mode="async", writer=writers.killed)

def test_hanging(ckpt_save):
    ckpt_save(mode="sync", writer=writers.hanging)

def test_after(ckpt_save, request):
    ckpt_save(mode="sync")
    print("world", request.getfixturevalue("ckpt_world").run(pids))
""",
    )
    return module_project.pytest("--ckpt-timeout=10", "-rA").require(1)


def part(result: Result, test: str) -> str:
    """Return what the output says of one test's failure."""
    parts = re.split(r"^_+ (\w+) _+$", result.out, flags=re.M)
    return parts[parts.index(test) + 1]


def test_the_tests_of_failing_ranks_fail_and_those_after_them_pass(failing: Result) -> None:
    failing.lines.fnmatch_lines_random(
        ["PASSED test_it.py::test_before", "PASSED test_it.py::test_after", "*3 failed, 2 passed*"]
    )


def test_a_full_target_is_named_with_rank_phase_and_what_is_free(failing: Result) -> None:
    text = part(failing, "test_full")
    assert re.search(r"^(E +)?rank 1 raised in phase '.*save.*': OSError: .*No space left on device", text, re.M)
    assert "target full or write failed: ENOSPC" in text
    assert re.search(r"while test_full was measured; target disk = .* free now$", text, re.M)


def test_a_killed_rank_is_named_with_its_signal(failing: Result) -> None:
    assert re.search(r"^(E +)?rank 1 died in phase '.*': killed by SIGKILL", part(failing, "test_killed"), re.M)


def test_a_hanging_rank_is_named_within_the_deadline(failing: Result) -> None:
    text = part(failing, "test_hanging")
    assert re.search(r"^(E +)?rank 1 .*stuck in phase '.*': no reply within 10(\.0)? s \(--ckpt-timeout\)", text, re.M)
    assert "in write_data" in text


def test_failures_start_new_worlds(failing: Result) -> None:
    before, after = re.findall(r"^world \[(.*)\]$", failing.out, re.M)
    assert not set(before.split(", ")) & set(after.split(", "))


def test_a_failed_save_says_nothing_of_an_unused_benchmark(failing: Result) -> None:
    failing.lines.no_fnmatch_line("*fixture was not used*")
