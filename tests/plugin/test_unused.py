"""The plugin costs other people nothing: it imports nothing heavy and says nothing where it is not used."""

from __future__ import annotations

from .project import SAVING_TEST, Project

HEAVY = ("torch", "numpy", "rich", "psutil", "msgspec", "pytest_ckpt.plugin.run")


def test_collecting_a_project_without_saves_imports_nothing_heavy(project: Project) -> None:
    project.write("test_it.py", "def test_nothing():\n    pass\n")
    program = f"import sys, pytest\npytest.main(['-q', '--co'])\nprint([m for m in {HEAVY!r} if m in sys.modules])\n"
    project.run("python", "-c", program).require(0).lines.fnmatch_lines(["[[]]"])


def test_collecting_tests_that_save_imports_no_torch(project: Project) -> None:
    project.write("test_it.py", SAVING_TEST)
    program = (
        "import sys, pytest\npytest.main(['-q', '--co'])\nprint([m for m in ('torch', 'numpy') if m in sys.modules])\n"
    )
    project.run("python", "-c", program).require(0).lines.fnmatch_lines(["2 tests collected*", "[[]]"])


def test_a_project_without_saves_sees_nothing_of_the_plugin(project: Project) -> None:
    project.write("test_it.py", "def test_nothing():\n    pass\n")
    result = project.run("python", "-m", "pytest", "-v").require(0)
    result.lines.no_fnmatch_line("*ckpt: *")
    assert not (project.path / ".pytest_cache/d/ckpt").exists()


def test_marks_are_registered_and_options_documented(project: Project) -> None:
    marks = project.run("python", "-m", "pytest", "--markers").require(0)
    marks.lines.fnmatch_lines([f"@pytest.mark.{mark}: *(pytest-ckpt)." for mark in ("ckpt_save", "ckpt_load")])
    shown = project.run("python", "-m", "pytest", "--help").require(0)
    shown.lines.fnmatch_lines(["distributed checkpoint saves (pytest-ckpt):", "*--ckpt-target=*", "*--ckpt-keep=*"])
