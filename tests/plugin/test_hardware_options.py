"""`--ckpt-hardware`, `--ckpt-expect-hardware`, the margins and their ini twins, accepted and refused without a save."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pytest_ckpt.errors import SettingError
from pytest_ckpt.plugin import values

from .project import Project, Result
from .stored import FAST, ID, as_saved, files, night, store, write_own

TEST = """
import pytest


def test_save(ckpt_save, ckpt_target):
    ckpt_save(mode="sync")


def in_ranks(rank):
    pass


def test_runs_in_ranks(ckpt_world):
    ckpt_world.run(in_ranks)
"""
SHM = Path("/dev/shm")


@pytest.fixture(scope="module")
def saving(module_project: Project) -> Project:
    """A project with one test that saves, and a baseline for it."""
    write_own(module_project)
    module_project.write("test_it.py", TEST)
    store(module_project.path / "baselines", "night1", as_saved(FAST))
    return module_project


def header(project: Project, *arguments: object, **options: Any) -> str:
    """Return what a run prints that only collects, and that it left nothing new anywhere in the project."""
    before = files(project.path)
    result = night(project, "--co", "-p", "no:cacheprovider", *arguments, **options)
    assert result.require(0).processes == []
    assert [name for name in files(project.path) if name not in before and "__pycache__" not in name] == []
    return result.out


def refused(project: Project, *arguments: object, **options: Any) -> str:
    """Return the one line of a run that was refused before anything was written."""
    before = files(project.path)
    result: Result = night(project, "-p", "no:cacheprovider", *arguments, **options)
    assert result.require(4).processes == []
    assert files(project.path) == before
    (line,) = [line for line in result.out.splitlines() if line.startswith("ERROR: ")]
    assert "Traceback" not in result.out
    return line


def ids(out: str) -> dict[str, str]:
    return dict(re.findall(r"ckpt: hardware id of (\S+): ([^;]+);", out))


def test_id_that_is_given_stands_for_every_target(saving: Project) -> None:
    out = header(saving, f"--ckpt-target=again={saving.target}")
    assert ids(out) == {"disk": ID, "again": ID}
    assert out.count("; baseline: 1 session of 1 scenario on 1 host in ") == 2


def test_id_of_one_label_leaves_the_others_alone(saving: Project) -> None:
    found = ids(header(saving, f"--ckpt-target=again={saving.target}", "--ckpt-hardware=again=other", hardware=None))
    assert found["again"] == "other"
    assert found["disk"] not in ("other", ID)


def test_number_of_comparisons_does_not_depend_on_the_targets_that_are_selected(saving: Project) -> None:
    again = f"--ckpt-target=again={saving.target}"
    assert "2 comparisons a run" in header(saving, again)
    assert "2 comparisons a run" in header(saving, again, "-k", "again")


def test_id_of_a_label_counts_before_the_id_of_all(saving: Project) -> None:
    given = ("--ckpt-hardware=again=other", f"--ckpt-target=again={saving.target}")
    assert ids(header(saving, *given)) == {"disk": ID, "again": "other"}


def test_default_target_has_a_label_too(saving: Project) -> None:
    out = header(saving, "--ckpt-hardware=local=mine", "--ckpt-expect-hardware=mine", hardware=None, target=False)
    assert ids(out) == {"local": "mine"}


@pytest.mark.parametrize("name", ["../up", "disk=../up", "a\nb", "disk="])
def test_id_that_is_no_name_of_a_folder_is_refused(saving: Project, name: str) -> None:
    option = "hardware" if name.startswith("disk") else "expect-hardware"
    line = refused(saving, f"--ckpt-{option}={name}", hardware=None)
    assert "cannot be the name of a folder" in line
    assert f"(from --ckpt-{option})" in line


@pytest.mark.parametrize("option", ["hardware", "expect-hardware"])
def test_unknown_label_is_refused_with_those_there_are(saving: Project, option: str) -> None:
    line = refused(saving, f"--ckpt-{option}=dsik=x", hardware=None)
    assert f"dsik=x (from --ckpt-{option}) names no target; the targets are: disk" in line


def test_label_of_a_target_that_no_selected_test_uses_is_known(saving: Project) -> None:
    out = header(saving, f"--ckpt-target=again={saving.target}", "--ckpt-hardware=again=other", "-k", "disk")
    assert ids(out) == {"disk": ID}


def test_label_of_the_default_target_is_known_where_no_selected_test_saves(saving: Project) -> None:
    header(saving, "--ckpt-hardware=local=mine", "-k=runs_in_ranks", hardware=None, target=False)


def test_id_that_was_expected_is_fine(saving: Project) -> None:
    header(saving, f"--ckpt-expect-hardware={ID}")
    found = ids(header(saving, hardware=None))["disk"]
    header(saving, f"--ckpt-expect-hardware=disk={found}", hardware=None)


def test_another_id_than_was_expected_ends_the_run_before_anything_is_written(saving: Project) -> None:
    found = ids(header(saving, hardware=None))["disk"]
    line = refused(saving, "--ckpt-expect-hardware=disk=other", hardware=None)
    assert f"has hardware id {found}, and --ckpt-expect-hardware names other: it is made of " in line
    assert "file system" in line


def test_expected_id_of_one_label_says_nothing_of_another(saving: Project) -> None:
    again = f"--ckpt-target=again={saving.target}"
    header(saving, again, "--ckpt-hardware=again=other", f"--ckpt-expect-hardware=disk={ID}")
    line = refused(saving, again, "--ckpt-hardware=again=other", f"--ckpt-expect-hardware={ID}")
    assert "target again (" in line


@pytest.mark.skipif(not SHM.is_dir(), reason="there is no /dev/shm here")
def test_memory_is_not_the_disk_that_was_expected(saving: Project) -> None:
    found = ids(header(saving, hardware=None))["disk"]
    given = (f"--ckpt-target=shm={SHM}", f"--ckpt-expect-hardware=shm={found}")
    assert "medium memory" in refused(saving, *given, hardware=None, target=False)


@pytest.mark.parametrize(
    ("given", "shown"),
    [("2.5 %", "2.5 %"), ("0.05", "5 %"), (None, "10 %")],
)
def test_margin_is_read_as_percent_or_share(saving: Project, given: str | None, shown: str) -> None:
    out = header(saving, *([f"--ckpt-tolerance={given}"] if given else []))
    assert f"ckpt: verdicts: tolerance {shown} of throughput{'' if given else ' (default)'}; 1 comparison a run" in out


def test_margin_that_is_no_share_is_refused(saving: Project) -> None:
    line = refused(saving, "--ckpt-tolerance=100%")
    assert "tolerance '100%' (from --ckpt-tolerance) is no share between 0 and 100 %; write it as 10% or 0.1" in line


@pytest.mark.parametrize(
    "given", ["", "0", "0%", "1", "5", 1, 5, "-5%", "five", "10%%", "nan", "inf", "1e-1", "5,5%", "%", True, None, []]
)
def test_share_that_is_none_is_refused(given: object) -> None:
    with pytest.raises(SettingError, match=r"\(from me\) is no share between"):
        values.tolerance(given, "me")


@pytest.mark.parametrize(("given", "share"), [("5%", 0.05), (".5", 0.5), (0.05, 0.05), (" 99.9 % ", 0.999)])
def test_share_is_read(given: object, share: float) -> None:
    assert values.tolerance(given, "me") == pytest.approx(share)


@pytest.mark.parametrize(
    ("mark", "problem"),
    [
        ("ckpt(tolerance='much')", "tolerance 'much' (from the mark ckpt of test_save"),
        ("ckpt(tolerance=5)", "tolerance '5' (from the mark ckpt of test_save"),
        ("ckpt('5%')", "'5%' (from the mark ckpt of test_save"),
        ("ckpt(tolerence='5%')", "tolerence (from the mark ckpt of test_save"),
    ],
)
def test_mark_that_cannot_be_used_ends_the_run_before_anything_is_written(
    project: Project, mark: str, problem: str
) -> None:
    write_own(project)
    project.write("test_it.py", TEST.replace("\n\ndef test_save", f"\n\n@pytest.mark.{mark}\ndef test_save"))
    assert problem in refused(project)


def test_names_that_fail_on_does_not_know_are_refused(saving: Project) -> None:
    assert "unknown outcome 'undecidet' (from --ckpt-fail-on); known, nearest first: undecided" in refused(
        saving, "--ckpt-fail-on=undecided,undecidet"
    )
    header(saving, "--ckpt-fail-on=undecided, undecided,")


def test_value_that_baseline_does_not_know_is_refused(saving: Project) -> None:
    assert "unknown value of --ckpt-baseline 'sav' (from --ckpt-baseline); known, nearest first: save" in refused(
        saving, "--ckpt-baseline=sav"
    )


def test_ini_file_has_all_of_it(project: Project) -> None:
    write_own(project)
    project.write("test_it.py", TEST)
    (project.path / "below").mkdir()
    store(project.path / "below/kept", "night1", as_saved(FAST))
    project.write(
        "pytest.ini",
        "[pytest]\nckpt_baseline = require\nckpt_baseline_dir = below/kept\nckpt_tolerance = 5%\n"
        f"ckpt_fail_on = undecided\nckpt_baseline_force = off\nckpt_hardware =\n  disk={ID}\n  again=other\n"
        f"ckpt_target =\n  disk=disk\n  again=disk\nckpt_expect_hardware = disk={ID}\n",
    )
    out = header(project, project.path, hardware=None, target=False, cwd=project.path / "below")
    assert ids(out) == {"disk": ID, "again": "other"}
    assert f"baseline: 1 session of 1 scenario on 1 host in {project.path}/below/kept; require\n" in out
    assert "tolerance 5 % of throughput; 1 comparison a run" in out


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("ckpt_hardware = a/b", "hardware id 'a/b' (from ini option ckpt_hardware in pytest.ini)"),
        ("ckpt_tolerance = 10", "tolerance '10' (from ini option ckpt_tolerance in pytest.ini)"),
        ("ckpt_baseline = on", "unknown value of --ckpt-baseline 'on' (from ini option ckpt_baseline in pytest.ini)"),
        ("ckpt_baseline_force = yes", "unknown value of a switch 'yes' (from ini option ckpt_baseline_force in"),
        (
            "ckpt_baseline_dir = pytest.ini",
            "'pytest.ini' (from ini option ckpt_baseline_dir in pytest.ini) is no folder",
        ),
    ],
)
def test_what_is_wrong_in_an_ini_file_is_refused_with_its_place(project: Project, line: str, problem: str) -> None:
    project.write("test_it.py", TEST)
    project.write("pytest.ini", f"[pytest]\n{line}\n")
    assert problem in refused(project, hardware=None)
