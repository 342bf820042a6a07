"""What `--ckpt-baseline` saves, and what it refuses to save or to judge by."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_ckpt.judge.store import Store

from ..judge.results import another
from .project import SUITE, Project, Result
from .stored import (
    FAST,
    ID,
    SLOW,
    SPREAD,
    USUAL,
    another_host_name,
    as_saved,
    files,
    junit,
    night,
    properties,
    record_of,
    rows,
    store,
    write_own,
)

GROW, SAVE, REQUIRE = (f"--ckpt-baseline={mode}" for mode in ("grow", "save", "require"))
HOST, USER = "host-9c2f", "us3r-4711"
SHM = Path("/dev/shm")


@dataclass
class Kept:
    project: Project
    result: Result
    host: str
    id_of: dict[str, str]
    paths: dict[str, Path]
    """Of the saved files, by the label of their target."""


@contextmanager
def in_memory(project: Project) -> Iterator[Path]:
    """Make a folder that lies in memory, which has another id than a disk."""
    if not os.access(SHM, os.W_OK):
        pytest.skip("there is no /dev/shm here")
    folder = SHM / f"{project.path.parent.name}-{project.path.name}-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """What a run on another host saved: into two folders of one disk, and into memory."""
    project = Project(tmp_path_factory.mktemp("kept-project"), {"USER": USER, "LOGNAME": USER})
    write_own(project)
    with in_memory(project) as memory:
        targets = (f"--ckpt-target=twin={project.target}", f"--ckpt-target=memory={memory}")
        result = night(project, *SUITE, SAVE, *targets, hardware=None, before=another_host_name(HOST))
        host = record_of(project.last(), "test_save[disk-own.small-r1-sync]")["host"]
        paths = {
            json.loads(path.read_text())["benchmarks"][0]["extra_info"]["ckpt"]["target"]["label"]: path
            for path in (project.path / "baselines").glob("*/*.json")
        }
        ids = dict(re.findall(r"ckpt: hardware id of (\S+): ([^;]+);", result.out))
        yield Kept(project, result, host, ids, paths)


def test_each_target_has_a_file_in_the_folder_of_its_id_with_its_rows_alone(kept: Kept) -> None:
    kept.result.require(0)
    assert kept.id_of["disk"] == kept.id_of["twin"] != kept.id_of["memory"]
    assert set(kept.paths) == {"disk", "twin", "memory"}
    assert len(files(kept.project.path / "baselines")) == 3 + len([".salt"])
    for label, path in kept.paths.items():
        assert path.parent.name == kept.id_of[label]
        name = f"test_save[{label}-own.small-r1"
        assert rows(path) == [f"{name}-sync]", f"{name}-async]", f"{name}-async]:stall"]
    first, second = (kept.paths[label].name for label in ("disk", "twin"))
    assert (first[:5], second[:5]) == ("0001_", "0002_")


def test_two_targets_of_one_volume_are_one_session(kept: Kept) -> None:
    stored = Store(kept.project.path / "baselines").read(kept.id_of["disk"])
    for scenario in stored.scenarios():
        (session,) = stored.sessions(scenario)
        assert sorted(record.target.label for record in session.records) == ["disk", "twin"]
    assert kept.result.out.count("(session 1 of 5)") == 3


def test_nothing_personal_is_in_what_was_saved(kept: Kept) -> None:
    for path in kept.paths.values():
        text = path.read_text()
        for name in (HOST, USER, str(kept.project.path), kept.project.path.name, str(kept.project.target), str(SHM)):
            assert name not in text
        assert not re.search(rf"\b{re.escape(kept.host)}\b", text)
        machine = json.loads(text)["machine_info"]
        assert re.fullmatch("[0-9a-f]{12}", machine["node"])
        assert json.loads(text)["benchmarks"][0]["extra_info"]["ckpt"]["target"]["mount"] == ""


def test_pytest_benchmark_compares_what_was_saved_from_another_folder(kept: Kept) -> None:
    elsewhere = kept.project.path / "elsewhere"
    elsewhere.mkdir()
    storage = f"--storage={kept.project.path / 'baselines'}"
    compared = kept.project.run("pytest-benchmark", storage, "compare", "--columns=median", cwd=elsewhere).require(0)
    assert sum(line.startswith("test_save[") for line in compared.out.splitlines()) == 9
    assert files(elsewhere) == []


@pytest.mark.long
def test_another_host_label_path_and_test_file_find_the_same_baseline(kept: Kept, tmp_path: Path) -> None:
    project = Project(tmp_path)
    write_own(project)
    project.write("test_renamed.py", "def test_other(ckpt_save, ckpt_mode):\n    ckpt_save(mode=ckpt_mode)\n")
    (project.path / "moved").mkdir()
    moved = f"--ckpt-target=nvme={project.path / 'moved'}"
    folder = f"--ckpt-baseline-dir={kept.project.path / 'baselines'}"
    result = night(project, moved, folder, REQUIRE, "--ckpt-tolerance=99.99%", hardware=None, target=False)
    result.require(0).lines.fnmatch_lines(
        [f"ckpt: hardware id of nvme: {kept.id_of['disk']}; baseline: 1 session of 2 scenarios on 1 host in *"]
    )
    verdicts = [v for row in project.last()["benchmarks"] for v in row["extra_info"]["ckpt"]["verdicts"]]
    assert {verdict["outcome"] for verdict in verdicts} == {"ok"}
    assert list((project.path / "moved").iterdir()) == []
    if kept.host != os.uname().nodename:
        assert all("measured on 1 other host" in verdict["text"] for verdict in verdicts)


@dataclass
class Grown:
    result: Result
    added: list[Path]


GROWING = """
import own

def test_young(ckpt_save):
    ckpt_save(mode="sync", writer=own.young)

def test_spread(ckpt_save):
    ckpt_save(mode="sync", writer=own.spread)

def test_old(ckpt_save):
    ckpt_save(mode="sync", writer=own.old)

def test_left_out(ckpt_save):
    ckpt_save(mode="sync", writer=own.left_out)
"""


@pytest.fixture(scope="module")
def grown(module_project: Project) -> Grown:
    """A night that grows what has four sessions and one, judges what has five, and runs a part of the tests."""
    write_own(module_project, "young", "spread", "old", "left_out")
    module_project.write("test_it.py", GROWING)
    folder = module_project.path / "grown"
    before = []
    for number in range(1, 6):
        records = [as_saved(FAST, "old")]
        records += [as_saved(FAST, "young")] if number < 5 else []
        records += [as_saved(SPREAD, "spread")] if number == 1 else []
        before.append(store(folder, f"night{number}", *records))
    result = night(module_project, GROW, "--ckpt-baseline-dir=grown", "-k", "not left_out")
    return Grown(result, [path for path in folder.glob("*/*.json") if path not in before])


def test_growing_saves_what_has_fewer_than_five_sessions_and_ran_each_row_once(grown: Grown) -> None:
    (path,) = grown.added
    assert path.name.startswith("0006_")
    assert rows(path) == ["test_young", "test_spread"]
    grown.result.lines.fnmatch_lines([f"baseline saved: *{path.name} (session 2 of 5)"])


def test_what_still_grows_is_judged_and_does_not_fail(grown: Grown) -> None:
    grown.result.lines.fnmatch_lines(
        ["  throughput regressed: *; not failed, since the baseline still grows (4 of 5 sessions)"]
    )


def test_what_has_grown_is_judged(grown: Grown) -> None:
    failed = [line for line in grown.result.out.splitlines() if line.startswith("FAILED")]
    assert len(failed) == 1
    assert failed[0].startswith("FAILED test_it.py::test_old - Failed: throughput regressed: ")
    grown.result.require(1)


def test_growing_takes_no_second_look(grown: Grown) -> None:
    (path,) = grown.added
    stats = {row["name"]: row["stats"] for row in json.loads(path.read_text())["benchmarks"]}
    assert (stats["test_spread"]["rounds"], len(stats["test_spread"]["data"])) == (4, 4)
    assert "second look" not in grown.result.out


BY_RANKS = "def test_it(ckpt_save, ckpt_world):\n    ckpt_save(mode='sync')\n"


@pytest.mark.long
def test_another_world_alone_does_not_grow_and_one_beside_the_known_does(project: Project) -> None:
    write_own(project)
    project.write("test_it.py", BY_RANKS)
    store(project.path / "baselines", "night1", as_saved(FAST))
    before = files(project.path / "baselines")
    alone = night(project, GROW, ranks=(2,)).require(1)
    alone.lines.fnmatch_lines(
        [f"FAILED *no baseline of this scenario on {ID}: it is held, which differs: world_size is 2, there 1; *"]
    )
    assert "--ckpt-baseline=save" in alone.out
    assert files(project.path / "baselines") == before
    both = night(project, GROW, ranks=(2, 1)).require(0)
    (added,) = set(files(project.path / "baselines")) - set(before)
    assert rows(project.path / "baselines" / added) == ["test_it[r2]", "test_it[r1]"]
    assert "(session 1 of 5)" in both.out


@pytest.mark.long
def test_another_id_grows_only_where_it_was_expected(project: Project) -> None:
    write_own(project)
    project.write("test_it.py", "def test_it(ckpt_save, ckpt_target):\n    ckpt_save(mode='sync')\n")
    store(project.path / "baselines", "night1", as_saved(FAST), hardware="old")
    ids = ("--ckpt-hardware=disk=new", "--ckpt-hardware=twin=newer", "--ckpt-expect-hardware=disk=new")
    result = night(project, GROW, *ids, f"--ckpt-target=twin={project.target}", hardware=None).require(1)
    result.lines.fnmatch_lines(
        [
            "*_ test_it?twin? _*",
            "no baseline of this scenario on newer: it is held under old, which differs: *"
            "--ckpt-expect-hardware=twin=newer",
            "FAILED test_it.py::test_it?twin? - Failed: no baseline of this scenario on newer: it is held under old, *",
        ]
    )
    assert {name.partition("/")[0] for name in files(project.path / "baselines")} == {".salt", "old", "new"}


HANGS = """

class Hanging(FileSystemWriter):
    def write_data(self, plan, planner):
        import time

        Path("saving").touch()
        time.sleep(600)


def hanging(path):
    return Hanging(path)
"""


@pytest.mark.long
def test_interrupted_run_saves_nothing(project: Project) -> None:
    write_own(project, "plain")
    with (project.path / "own.py").open("a") as file:
        file.write(HANGS)
    project.write(
        "test_it.py",
        "import own\n\ndef test_saves(ckpt_save):\n    ckpt_save(mode='sync', writer=own.plain)\n\n"
        "def test_hangs(ckpt_save):\n    ckpt_save(mode='sync', writer=own.hanging)\n",
    )
    result = night(project, SAVE, when=lambda: (project.path / "saving").exists()).require(2)
    assert "baseline saved" not in result.out
    assert len(project.last()["benchmarks"]) == 1
    assert not (project.path / "baselines").exists()


def test_two_runs_that_save_at_once_lose_nothing(project: Project) -> None:
    write_own(project)
    project.write("test_it.py", "def test_it(ckpt_save):\n    ckpt_save(mode='sync')\n")
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(night, project, SAVE, "-p", "no:cacheprovider") for _ in range(2)]
        assert [run.result().status for run in runs] == [0, 0], [run.result().out for run in runs]
    stored = Store(project.path / "baselines").read(ID)
    assert (len(stored.entries), stored.damaged) == (2, [])
    assert len({entry.session for entry in stored.entries}) == 2
    assert len({entry.host for entry in stored.entries}) == 1
    assert len(files(project.path / "baselines")) == 2 + len([".salt"])


TWICE = """
import own
import pytest

def test_regresses(ckpt_save):
    ckpt_save(mode="sync", writer=own.fast)

@pytest.mark.ckpt(tolerance="99.999999%")
def test_is_fine(ckpt_save):
    ckpt_save(mode="sync", writer=own.fast)
"""


@pytest.fixture(scope="module")
def saved_twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Result, list[Path]]:
    """A run that saves one scenario in two tests, one of which regressed."""
    project = Project(tmp_path_factory.mktemp("project"))
    write_own(project, "fast")
    project.write("test_it.py", TWICE)
    first = store(project.path / "baselines", "night1", as_saved(FAST, "fast"))
    result = night(project, SAVE)
    return project, result, [path for path in first.parent.glob("*.json") if path != first]


def test_regressed_test_fails_where_another_of_the_same_scenario_is_fine(
    saved_twice: tuple[Project, Result, list[Path]],
) -> None:
    saved_twice[1].require(1).lines.fnmatch_lines(
        ["ckpt: not saved as baseline, since it regressed: disk sync; *", "FAILED *test_regresses - *"]
    )


def test_regressed_row_is_not_saved_with_another_of_the_same_scenario(
    saved_twice: tuple[Project, Result, list[Path]],
) -> None:
    assert [rows(path) for path in saved_twice[2]] == [["test_is_fine"]]


AGAIN = """
import time

import own
import pytest
from torch.distributed.checkpoint import FileSystemWriter


class Slow(FileSystemWriter):
    def __init__(self, path, seconds):
        super().__init__(path)
        self.seconds = seconds

    def write_data(self, plan, planner):
        time.sleep(self.seconds)
        return super().write_data(plan, planner)


def slow_at_first(path):
    return Slow(path, 0 if own.Path("second").exists() else 1.2)


def sluggish(path):
    return Slow(path, 0.8)


@pytest.mark.flaky(reruns=1)
@pytest.mark.ckpt(tolerance="97%")
def test_again(ckpt_save):
    try:
        ckpt_save(mode="sync", writer=slow_at_first)
    finally:
        own.Path("second").touch()


def test_too_slow_for_two(ckpt_save):
    ckpt_save(mode="sync", writer=sluggish)
"""


@dataclass
class Slow:
    project: Project
    result: Result
    junit: Path


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Slow:
    """A run with little time, in which a test is slow at its first try alone."""
    project = Project(tmp_path_factory.mktemp("project"))
    write_own(project)
    project.write("test_it.py", AGAIN)
    of_tests = {"slow_at_first": USUAL, "sluggish": SPREAD}
    records = [another(as_saved(seconds), writer=f"test_it:{name}") for name, seconds in of_tests.items()]
    store(project.path / "baselines", "night1", *records)
    path = project.path / "junit.xml"
    return Slow(project, night(project, "--ckpt-max-time=8s", f"--junitxml={path}"), path)


@pytest.mark.long
def test_regression_stays_red_though_the_second_try_is_fine(slow: Slow) -> None:
    slow.result.require(1).lines.fnmatch_lines(
        ["FAILED *test_again - Failed: throughput regressed: *", "*1 failed, 1 passed, 1 rerun*"]
    )


@pytest.mark.long
def test_junit_says_one_thing_of_a_test_that_ran_twice(slow: Slow) -> None:
    case = junit(slow.junit)["test_again"]
    assert case.find("failure") is not None
    assert properties(case)["ckpt throughput outcome"] == "regressed"


@pytest.mark.long
def test_second_look_that_does_not_fit_is_not_taken_and_that_is_said(slow: Slow) -> None:
    record = record_of(slow.project.last(), "test_too_slow_for_two")
    slow.result.lines.fnmatch_lines(["*: no second look was taken: * left, and it needs *"])
    assert (len(record["rounds"]), record["verdicts"][0]["outcome"]) == (4, "undecided")


@dataclass
class Damaged:
    project: Project
    folder: Path


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    """A folder in which one file is whole, and many are not."""
    project = Project(tmp_path_factory.mktemp("project"))
    write_own(project, "named")
    project.write(
        "test_it.py",
        "import own\n\ndef test_it(ckpt_save):\n    ckpt_save(mode='sync')\n\n"
        "def test_named(ckpt_save):\n    ckpt_save(mode='sync', writer=own.named)\n",
    )
    whole = store(project.path / "baselines", "night1", as_saved(SLOW))
    folder = whole.parent
    text = whole.read_text()
    document = json.loads(text)

    def changed(name: str, **parts: Any) -> None:
        (folder / name).write_text(json.dumps({**document, **parts}))

    (folder / "0002_empty.json").touch()
    (folder / "0003_cut.json").write_text(text[: len(text) // 2])
    (folder / "0004_foreign.json").write_text('{"benchmarks": []}')
    changed("0005_future.json", ckpt_baseline={**document["ckpt_baseline"], "format": 2})
    changed("0006_plain.json", ckpt_baseline=None)
    changed("0007_steering.json", datetime="\x1b[2J\x1b]0;owned\x07")
    changed("0008_elsewhere.json", ckpt_baseline={**document["ckpt_baseline"], "hardware_id": "another"})
    (folder / "0009_deep.json").write_text("[" * 100_000)
    (folder / "0010_binary.json").write_bytes(bytes(range(256)))
    (folder / "0011_number.json").write_text(text.replace('"hosts": 1', f'"hosts": 1{"0" * 5000}'))
    (folder / "0012_folder.json").mkdir()
    (folder / "0013_link.json").symlink_to("/etc/passwd")
    os.mkfifo(folder / "0014_pipe.json")
    (folder / "notes.json").write_text(text)
    (folder / "README.md").write_text("of no interest")
    return Damaged(project, folder)


@pytest.fixture(scope="module")
def checked(damaged: Damaged) -> Result:
    return night(damaged.project, "-k", "test_it")


def test_damaged_and_foreign_files_are_named_each_in_a_line_and_the_rest_is_judged(checked: Result) -> None:
    checked.require(0)
    said = [line for line in checked.out.splitlines() if line.startswith("ckpt: baseline ")]
    for name, problem in (
        ("0002_empty", "it is empty"),
        ("0003_cut", "it is no JSON, or cut off"),
        ("0004_foreign", "it is no baseline of checkpoint saves"),
        ("0005_future", "it was written by a newer pytest-ckpt: it has format 2, this one reads 1"),
        ("0006_plain", "it was saved by pytest-benchmark itself"),
        ("0007_steering", "it holds control characters"),
        ("0008_elsewhere", "it is a baseline of another"),
        ("0009_deep", "it is nested too deeply"),
        ("0010_binary", "it is no text in UTF-8"),
        ("0011_number", "it holds a number that cannot be read"),
        ("0012_folder", "it is a folder"),
        ("0013_link", "it is a symbolic link"),
        ("0014_pipe", "it is no regular file"),
        ("notes", "its name is not that of a baseline"),
    ):
        assert [line for line in said if f"/{name}.json is not used: {problem}" in line], name
    assert len(said) == 14
    checked.lines.fnmatch_lines(["  throughput improved: *"])
    assert "Traceback" not in checked.out
    assert "\x1b" not in checked.out


@pytest.mark.parametrize("mode", [REQUIRE, GROW])
def test_damaged_file_ends_a_run_that_must_not_miss_one(damaged: Damaged, mode: str) -> None:
    result = night(damaged.project, mode, "-k", "test_it").require(4)
    (line,) = [line for line in result.out.splitlines() if line.startswith("ERROR: ")]
    assert "0002_empty.json is not used: it is empty; restore it, or remove it on purpose" in line
    assert "Traceback" not in result.out


@pytest.mark.long
def test_disabled_benchmarks_judge_by_nothing_and_save_nothing(damaged: Damaged) -> None:
    before = files(damaged.project.path / "baselines")
    result = night(damaged.project, "--benchmark-disable", SAVE, "-k", "test_it").require(0)
    assert files(damaged.project.path / "baselines") == before
    assert "baselines off: nothing is judged" in result.out
    assert "throughput" not in result.out


HARD = """
import own
import pytest


def test_huge(ckpt_save):
    ckpt_save(mode="sync", writer=own.huge)


def test_large(ckpt_save):
    ckpt_save(mode="sync", writer=own.large)


def test_named(ckpt_save):
    ckpt_save(mode="sync", writer=own.named)


@pytest.fixture
def ahead(ckpt_save):
    return ckpt_save(mode="sync", writer=own.named)


def test_after_a_save(ahead):
    pass


@pytest.fixture
def behind(ckpt_save, ckpt_target, ckpt_model, ckpt_world):
    yield
    ckpt_save(mode="sync", writer=own.named)


def test_before_a_save(behind):
    pass
"""


@pytest.fixture(scope="module")
def hard(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run over files with figures beyond all measure, and with names that steer a terminal."""
    project = Project(tmp_path_factory.mktemp("project"))
    write_own(project, "huge", "large", "named")
    project.write("test_it.py", HARD)
    folder = project.path / "baselines"
    huge = store(folder, "night1", as_saved(SLOW, "huge"))
    document = json.loads(huge.read_text())
    (row,) = document["benchmarks"]
    for taken in row["extra_info"]["ckpt"]["rounds"]:
        taken["save_s"] = taken["stall_s"] = 1e308
    row["stats"]["data"] = [1e308] * len(SLOW)
    huge.write_text(json.dumps(document))
    large = store(folder, "night2", as_saved(FAST, "large"))
    large.write_text(re.sub(r'"logical_bytes": \d+', f'"logical_bytes": 1{"0" * 400}', large.read_text()))
    named = store(folder, "night3", as_saved(FAST, "named"))
    named.rename(named.with_name("0003_\x1b[2J.json"))
    named.with_name("0004_\x1b[31m.json").touch()
    (folder / ".salt").write_text("of no use")
    return night(project)


@pytest.mark.long
def test_damaged_salt_is_said_and_the_rest_is_judged(hard: Result) -> None:
    hard.require(1).lines.fnmatch_lines(
        ["ckpt: the salt of the baselines, */.salt, is damaged; restore it from git, *"]
    )


@pytest.mark.long
def test_save_of_a_fixture_fails_the_test_that_uses_it(hard: Result) -> None:
    hard.lines.fnmatch_lines(["FAILED *::test_after_a_save - Failed: throughput regressed: *"])


@pytest.mark.long
def test_save_in_the_teardown_of_a_fixture_is_not_passed_over(hard: Result) -> None:
    hard.lines.re_match_lines(["(FAILED|ERROR) .*::test_before_a_save"])


@pytest.mark.long
def test_baseline_of_endless_seconds_brings_no_traceback(hard: Result) -> None:
    assert "math range error" not in hard.out


@pytest.mark.long
def test_baseline_of_endless_bytes_brings_no_traceback(hard: Result) -> None:
    assert "int too large" not in hard.out


@pytest.mark.long
def test_name_of_a_file_steers_no_terminal(hard: Result) -> None:
    assert "throughput regressed" in hard.out
    assert "\x1b" not in hard.out


def test_folder_that_is_a_file_is_refused_before_anything_is_written(project: Project) -> None:
    write_own(project)
    project.write("test_it.py", "def test_it(ckpt_save):\n    ckpt_save(mode='sync')\n")
    project.write("file", "")
    for mode, folder, problem in (
        (SAVE, "file", "'file' (from --ckpt-baseline-dir) is no folder"),
        (SAVE, "file/below", "baselines cannot be saved in "),
        (GROW, "file/below", "file/below/the-id is not used: it cannot be read: Not a directory"),
        ("--ckpt-baseline=check", "file", "'file' (from --ckpt-baseline-dir) is no folder"),
    ):
        result = night(project, mode, f"--ckpt-baseline-dir={folder}").require(4)
        (line,) = [line for line in result.out.splitlines() if line.startswith("ERROR: ")]
        assert problem in line
    (project.path / "baselines").mkdir()
    (project.path / "baselines" / ID).touch()
    result = night(project, SAVE).require(4)
    assert "Traceback" not in result.out


@pytest.mark.long
def test_nothing_is_written_where_nothing_is_saved_or_only_collected(project: Project) -> None:
    write_own(project)
    project.write("test_it.py", "def test_it(ckpt_save):\n    ckpt_save(mode='sync')\n")
    for arguments in (("--co", SAVE), ("--co", REQUIRE), ("-n1", SAVE), ("-n1", GROW), ("--setup-plan", SAVE)):
        night(project, *arguments).require(0)
        assert not (project.path / "baselines").exists(), arguments
    store(project.path / "baselines", "night1", as_saved(FAST))
    (project.path / "baselines" / ".salt").unlink()
    before = files(project.path / "baselines")
    for arguments in (("--co", GROW), ("-n1", SAVE)):
        night(project, *arguments).require(0)
        assert files(project.path / "baselines") == before


@pytest.mark.long
def test_off_judges_nothing_and_a_run_without_baselines_makes_no_folder(project: Project) -> None:
    write_own(project, "fast")
    project.write("test_it.py", "import own\n\ndef test_it(ckpt_save):\n    ckpt_save(mode='sync', writer=own.fast)\n")
    store(project.path / "kept", "night1", as_saved(FAST, "fast"))
    off = night(project, "--ckpt-baseline=off", "--ckpt-baseline-dir=kept").require(0)
    off.lines.fnmatch_lines([f"ckpt: hardware id of disk: {ID}; baselines off: nothing is judged"])
    assert record_of(project.last(), "test_it")["verdicts"] == []
    fresh = night(project).require(0)
    fresh.lines.fnmatch_lines([f"ckpt: hardware id of disk: {ID}; baseline: none in */baselines; check (default)"])
    assert not (project.path / "baselines").exists()
