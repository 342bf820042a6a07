"""What cannot be used is refused before anything is written: exit status 4, one sentence, value, source, remedy."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

import pytest

from .project import SAVING_TEST, Project, Result

Mount = Callable[[str], None]


@pytest.fixture(autouse=True)
def saving_test(project: Project) -> None:
    project.write("test_it.py", SAVING_TEST)


def refused(result: Result, *parts: str) -> None:
    """Check that the run was refused by one line that holds all of `parts`, and wrote nothing."""
    result.require(4)
    errors = [line for line in result.out.splitlines() if line.startswith("ERROR: ")]
    assert len(errors) == 1, result.out
    for part in parts:
        assert part in errors[0]


@pytest.mark.parametrize(
    ("option", "parts"),
    [
        ("--ckpt-model=llama3-9b", ["'llama3-9b'", "--ckpt-model", "nearest first: llama3-8b"]),
        ("--ckpt-mode=asink", ["'asink'", "--ckpt-mode", "nearest first: async, "]),
        ("--ckpt-state=fp32adam", ["'fp32adam'", "--ckpt-state", "nearest first: fp32-adamw"]),
        ("--ckpt-ranks=0", ["'0'", "--ckpt-ranks", "write 1, 2, 4"]),
        ("--ckpt-ranks=-1", ["'-1'", "--ckpt-ranks", "write 1, 2, 4"]),
        ("--ckpt-ranks=x", ["'x'", "--ckpt-ranks", "write 1, 2, 4"]),
        ("--ckpt-rounds=0", ["'0'", "--ckpt-rounds", "write 1"]),
        ("--ckpt-timeout=5parsecs", ["'5parsecs'", "--ckpt-timeout", "s, m, min, h"]),
        ("--ckpt-max-time=-3s", ["'-3s'", "--ckpt-max-time", "as in 15m"]),
        ("--ckpt-keep=some", ["'some'", "--ckpt-keep", "none, failed, all"]),
        ("--ckpt-device=tpu", ["'tpu'", "--ckpt-device", "cpu, cuda"]),
        ("--ckpt-writer=nonsense", ["'nonsense'", "--ckpt-writer", "takes package.module:function too"]),
        ("--ckpt-writer=no_such_module:make", ["'no_such_module:make'", "--ckpt-writer", "no_such_module"]),
        ("--ckpt-model=no_such_module:make", ["'no_such_module:make'", "--ckpt-model", "no_such_module"]),
        ("--ckpt-target=a b=/tmp", ["'a b=/tmp'", "--ckpt-target", "write a-b=/tmp"]),
        ("--ckpt-target=disk=", ["'disk='", "--ckpt-target", "write disk=PATH"]),
        ("--ckpt-target=disk=/tmp", ["two targets are labelled 'disk'", "--ckpt-target", "write LABEL=PATH"]),
        ("--ckpt-model=llama3-405b", ["needs 4.87 TB", "free", "smaller --ckpt-model"]),
    ],
)
def test_a_value_that_cannot_be_used_is_refused(project: Project, option: str, parts: list[str]) -> None:
    given = ["--ckpt-model=llama3-tiny"] if "--ckpt-model" not in option else []
    command = ["python", "-m", "pytest", f"--ckpt-target={project.target}", *given, option]
    refused(project.run(*command), *parts)


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(project: Project) -> None:
    refused(project.pytest("--ckpt-device=cuda"), "'cuda'", "--ckpt-device", "no CUDA device", "write cpu")


def test_a_missing_target_is_refused(project: Project) -> None:
    given = project.path / "missing"
    refused(
        project.pytest(f"--ckpt-target=x={given}", target=False),
        f"'{given}'",
        "--ckpt-target",
        "cannot be reached",
        "write the path of a folder",
    )
    assert not given.exists()


def test_a_refusal_is_the_same_when_tests_are_only_collected(project: Project) -> None:
    refused(project.pytest("--co", "-q", "--ckpt-target=x=missing", target=False), "'missing'", "--ckpt-target")


def test_a_file_as_target_is_refused(project: Project) -> None:
    given = project.write("file", "precious")
    refused(
        project.pytest(f"--ckpt-target={given}", target=False), "not a folder", f"write a folder, as in {given.parent}"
    )
    assert given.read_text() == "precious"


def test_a_dangling_link_as_target_is_refused(project: Project) -> None:
    link = project.path / "link"
    link.symlink_to("nowhere")
    refused(project.pytest(f"--ckpt-target={link}", target=False), "links to", "nowhere", "cannot be reached")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_target_without_write_permission_is_refused(project: Project) -> None:
    project.target.chmod(0o500)
    refused(project.pytest(), "may not write there", "write a folder of this user")


@pytest.fixture
def mounted(project: Project) -> Iterator[Callable[[str], None]]:
    """Mounts a file system in memory at the target, with the options given."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")

    def mount(options: str) -> None:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "ckpt", project.target]).returncode:
            pytest.skip("this container may not mount")

    yield mount
    if os.path.ismount(project.target):
        subprocess.run(["umount", project.target], check=True)


def test_a_target_that_is_too_full_is_refused_with_both_figures(project: Project, mounted: Mount) -> None:
    mounted("size=4m")
    refused(project.pytest(), "needs 11.0 MB", "has 4.19 MB free", str(project.target), "smaller --ckpt-model")


def test_a_target_mounted_read_only_is_refused(project: Project, mounted: Mount) -> None:
    mounted("ro")
    refused(project.pytest(), "mounted read-only", "write a path on another one")


def test_a_state_larger_than_memory_is_refused_with_both_figures(project: Project, mounted: Mount) -> None:
    mounted("size=100t")  # no disk of that size is at hand
    result = project.pytest("--ckpt-model=llama3-405b", "--ckpt-mode=async")
    refused(result, "llama3-405b with fp32-adamw on 2 ranks", "TB of memory", "are available", "--ckpt-mode=sync")


def test_a_wrong_ini_value_is_named_with_its_ini_file(project: Project) -> None:
    project.write("pytest.ini", "[pytest]\nckpt_ranks = 2\n  two\n")
    refused(project.pytest(), "'two'", "ini option ckpt_ranks in pytest.ini", "write 1, 2, 4")


def test_a_wrong_overridden_ini_value_is_named_with_its_option(project: Project) -> None:
    refused(project.pytest("-o", "ckpt_timeout=soon"), "'soon'", "-o ckpt_timeout", "as in 15m")


def test_the_command_line_replaces_the_ini_value(project: Project) -> None:
    project.write("pytest.ini", "[pytest]\nckpt_ranks = two\nckpt_mode = sync\n")
    result = project.pytest("--ckpt-ranks=1", "--ckpt-ranks=2", "--co", "-q").require(0)
    result.lines.fnmatch_lines(["*test_save?disk-llama3-tiny-r1-sync?", "*test_save?disk-llama3-tiny-r2-sync?"])


def test_a_relative_target_in_the_ini_file_is_relative_to_that_file(project: Project) -> None:
    project.write("pytest.ini", "[pytest]\nckpt_target = fast=disk\n")
    below = project.path / "below"
    below.mkdir()
    result = project.run("python", "-m", "pytest", "--co", "..", cwd=below).require(0)
    result.lines.fnmatch_lines([f"ckpt: target fast = {project.target} *"])


def test_a_test_that_asks_for_ckpt_save_too_late_is_told_so(project: Project) -> None:
    late = "def test_late(request):\n    request.getfixturevalue('ckpt_save')\n"
    for others in ("", "def test_function(ckpt_world):\n    pass\n"):
        project.write("test_it.py", late + others)
        result = project.pytest().require(1)
        result.lines.fnmatch_lines(["*ckpt_save was requested while the tests ran*name it among the arguments*"])


def test_there_is_no_default_target_without_temporary_folders(project: Project) -> None:
    refused(project.pytest("-p", "no:tmpdir", target=False), "-p no:tmpdir", "give --ckpt-target=DIR")


def test_what_a_call_gets_wrong_ends_with_status_4_and_no_save(project: Project) -> None:
    project.write(
        "test_it.py",
        """
import pytest

def test_lambda(ckpt_save):
    ckpt_save(writer=lambda path: None)

def test_closure(ckpt_save):
    def writer(path):
        return None
    ckpt_save(writer=writer)

def test_mode(ckpt_save):
    ckpt_save(mode="sink")

def test_model(ckpt_save):
    ckpt_save(model="llama3-9b")

def test_too_large(ckpt_save):
    ckpt_save(model="llama3-405b")

@pytest.mark.parametrize("ckpt_world", [2])
def test_direct(ckpt_save, ckpt_world):
    ckpt_save()
""",
    )
    result = project.pytest().require(4)
    result.lines.fnmatch_lines_random(
        [
            "writer *<lambda>' is a lambda*module and name*move it to module level*",
            "writer *closure*<locals>.writer' is defined inside another function*move it to module level*",
            "unknown mode 'sink' (from ckpt_save); known, nearest first: sync, *",
            "unknown model 'llama3-9b' (from ckpt_save); known, nearest first: llama3-8b*",
            "the save needs 4.87 TB and * free*",
            "ckpt_world is 2, *parametrize it with indirect=True",
            "*6 failed*",
        ]
    )


def test_a_second_call_without_a_name_ends_with_status_4(project: Project) -> None:
    project.write(
        "test_it.py",
        """
def test_twice(ckpt_save):
    ckpt_save(mode="sync")
    ckpt_save(mode="sync")
""",
    )
    result = project.pytest("--ckpt-rounds=1").require(4)
    result.lines.fnmatch_lines(["a second ckpt_save without a name in one test*ckpt_save(name='eight-threads')"])


def test_a_target_without_tests_that_save_names_the_command(project: Project) -> None:
    project.write("test_it.py", "def test_nothing():\n    pass\n")
    result = project.pytest().require(0)
    result.lines.fnmatch_lines(
        [f"ckpt: a target was given (--ckpt-target) and no test*`pytest-ckpt run {project.target}`*"]
    )
    (project.path / "test_it.py").unlink()
    project.pytest().require(5).lines.fnmatch_lines(["ckpt: a target was given*`pytest-ckpt run *"])


def test_a_target_whose_tests_are_all_deselected_says_so(project: Project) -> None:
    project.pytest("-k", "nothing").require(5).lines.fnmatch_lines(["ckpt: a target was given*no test*was selected"])
