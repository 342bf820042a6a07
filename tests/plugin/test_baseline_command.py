"""`pytest-ckpt baseline`: from a result file to a baseline and back to a list, as a person types it."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_ckpt.judge.history import Point
from pytest_ckpt.judge.scenarios import short_key
from pytest_ckpt.judge.store import Store
from pytest_ckpt.plugin.command import main
from pytest_ckpt.records import SaveRecord, Verdict

from ..judge.results import ID, PLANTED, SESSION, another, result, saved, write
from .project import Project

OTHER_ID = "epyc-2cpu-nvme-xfs"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's folder, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*arguments: object) -> tuple[int, str, str]:
        status = main(["baseline", *map(str, arguments)])
        return status, *capsys.readouterr()

    return command


def run_file(folder: Path, *records: SaveRecord, name: str = "run.json") -> Path:
    return write(result(*records), folder / name)


def regressed(record: SaveRecord) -> SaveRecord:
    verdict = Verdict(metric="throughput", outcome="regressed", text="throughput 40 % below 0001_x.json")
    return msgspec.structs.replace(record, verdicts=[verdict])


def stored(folder: Path, hardware_id: str = ID) -> Any:
    return Store(folder / "baselines").read(hardware_id)


def refused(outcome: tuple[int, str, str]) -> str:
    """Return the one sentence of a command that was refused and has written nothing."""
    status, out, error = outcome
    assert (status, out, error.count("\n")) == (4, "", 1)
    assert not list(Path("baselines").glob("*/*.json"))
    return error


def test_result_file_becomes_a_baseline_without_a_rerun(folder: Path, run: Run) -> None:
    file = run_file(folder, saved("sync"), saved("async"))
    status, out, _ = run("add", file, "--reason", "first night")
    (path,) = (folder / "baselines" / ID).iterdir()
    assert (status, out) == (0, f"baselines/{ID}/{path.name}: 2 scenarios of target disk\n")
    (entry,) = stored(folder).entries
    assert (entry.session, entry.head.reason, entry.head.replaces, entry.head.example) == (
        SESSION,
        "first night",
        False,
        False,
    )
    assert [name for name in PLANTED if name in path.read_text()] == []


def test_each_target_goes_under_its_own_id(folder: Path, run: Run) -> None:
    file = run_file(folder, saved(), saved(label="nvme", hardware_id=OTHER_ID))
    assert run("add", file, "--reason", "x", "--dir", "elsewhere")[0] == 0
    store = Store(folder / "elsewhere")
    assert [(i, entry.label) for i in store.ids() for entry in store.read(i).entries] == [
        (OTHER_ID, "nvme"),
        (ID, "disk"),
    ]


def test_replacing_is_marked(folder: Path, run: Run) -> None:
    file = run_file(folder, regressed(saved()))
    status, out, _ = run("replace", file, "--reason", "writers halved on purpose", "--force")
    assert (status, out.endswith(", in place of what was before\n")) == (0, True)
    assert stored(folder).entries[0].head.replaces


def test_example_is_marked(folder: Path, run: Run) -> None:
    assert run("add", run_file(folder, saved()), "--reason", "x", "--example")[0] == 0
    assert stored(folder).has_only_examples(saved().scenario)


def test_run_that_is_there_already_is_refused_before_anything_is_written(folder: Path, run: Run) -> None:
    run("add", run_file(folder, saved(label="nvme", hardware_id=OTHER_ID)), "--reason", "x")
    both = run_file(folder, saved(), saved(label="nvme", hardware_id=OTHER_ID))
    status, _, error = run("add", both, "--reason", "x")
    assert status == 4
    assert f"saved into nvme is there already: baselines/{OTHER_ID}/0001_" in error
    assert stored(folder).entries == []


def test_regression_is_refused_unless_it_is_meant(folder: Path, run: Run) -> None:
    file = run_file(folder, saved("sync"), regressed(saved("async")))
    assert refused(run("add", file, "--reason", "x")) == (
        "pytest-ckpt: llama3-debug r2 async on disk has regressed (throughput 40 % below 0001_x.json); write --force "
        "to make this what is expected\n"
    )
    assert run("add", file, "--reason", "x", "--force")[0] == 0


def test_too_few_rounds_are_refused_even_by_force(folder: Path, run: Run) -> None:
    file = run_file(folder, saved(seconds=(1.0, 2.0, 3.0)))
    assert "has 3 rounds, too few to judge by" in refused(run("add", file, "--reason", "x", "--force"))


def test_run_without_an_id_needs_one(folder: Path, run: Run) -> None:
    file = run_file(folder, saved(hardware_id=""), saved(label="nvme", hardware_id=""))
    assert "write --hardware=disk=ID" in refused(run("add", file, "--reason", "x"))
    assert "write --hardware=disk=ID" in refused(run("add", file, "--reason", "x", "--hardware=nvme=b"))
    assert run("add", file, "--reason", "x", "--hardware=a", "--hardware=nvme=b")[0] == 0
    assert [stored(folder, name).entries[0].label for name in ("a", "b")] == ["disk", "nvme"]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("nvm=x", "unknown target 'nvm' (from --hardware); known, nearest first: disk"),
        ("a=b=c", "is no [LABEL=]ID"),
        ("../x", "cannot be a hardware id"),
        ("", "is no [LABEL=]ID"),
    ],
)
def test_hardware_that_cannot_be_used_is_refused(folder: Path, run: Run, given: str, problem: str) -> None:
    assert problem in refused(run("add", run_file(folder, saved()), "--reason", "x", f"--hardware={given}"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "missing.json cannot be read: No such file or directory"),
        ("", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("{}", "is no file of pytest-benchmark"),
        ('{"benchmarks": [{"extra_info": {}}]}', "holds no checkpoint saves"),
        ('{"benchmarks": [{"group": "save", "extra_info": {"ckpt": {}}}]}', "in row 1 what is no record of a save"),
    ],
    ids=["missing", "empty", "deep", "object", "foreign", "no record"],
)
def test_file_that_cannot_be_used_is_refused(folder: Path, run: Run, text: str | None, problem: str) -> None:
    if text is not None:
        (folder / "missing.json").write_text(text)
    assert problem in refused(run("add", "missing.json", "--reason", "x"))


def test_reason_must_say_something(folder: Path, run: Run) -> None:
    assert "gives no reason" in refused(run("add", run_file(folder, saved()), "--reason", " "))
    with pytest.raises(SystemExit) as caught:
        run("add", run_file(folder, saved()))
    assert caught.value.code == 2


def add(folder: Path, session: str, *records: SaveRecord, **options: Any) -> None:
    of_run = [msgspec.structs.replace(record, session=session) for record in records]
    Store(folder / "baselines").add(result(*of_run), of_run[0].hardware_id, label="disk", **options)


@pytest.fixture
def filled(folder: Path) -> Path:
    """Three nights of two scenarios, one replaced by the last night; an example; a file that is cut off."""
    for night in range(3):
        time = f"2026-11-{night + 1:02}T23:00:00+00:00"
        records = [saved("sync", time=time), saved("async", seconds=(2.0 + night,) * 4, time=time)]
        add(folder, f"night{night}", *records, replaces=night == 2)
    add(folder, "shown", saved(hardware_id=OTHER_ID), example=True)
    (folder / "baselines" / ID / "0009_cut.json").write_text('{"benchmarks": [')
    return folder


def test_list_shows_what_is_judged_against_and_names_what_cannot_be_used(filled: Path, run: Run) -> None:
    status, out, _ = run("list")
    assert status == 0
    key = short_key(saved("async").scenario)
    pytest.LineMatcher(out.splitlines()).fnmatch_lines(
        [
            OTHER_ID,
            "  1 * llama3-debug * 2 * sync * FileSystemWriter * example * 1 * 1.00 s * 2026-11-29",
            ID,
            f"  3 * {key} * llama3-debug * 2 * async * FileSystemWriter * 1 * 1 * 4.00 s * 571 ms * 0.07 * 2026-11-03",
            f"cannot be used: baselines/{ID}/0009_cut.json: it is no JSON, or cut off (*",
        ]
    )


def test_list_of_one_id_shows_no_other(filled: Path, run: Run) -> None:
    status, out, _ = run("list", OTHER_ID)
    assert (status, ID in out, OTHER_ID in out) == (0, False, True)


def test_list_tells_scenarios_apart_that_differ_in_what_has_no_column(folder: Path, run: Run) -> None:
    add(folder, "one", saved(), another(saved(), state="bf16", options={"threads": 4}))
    out = run("list")[1]
    assert "options={'threads': 4}, state=bf16" in " ".join(out.split())


def test_history_is_a_line_for_each_night(filled: Path, run: Run) -> None:
    status, out, error = run("list", ID, "--csv", "--scenario", short_key(saved("async").scenario))
    rows = list(csv.DictReader(out.splitlines()))
    assert status == 0
    assert [row["time"] for row in rows] == [f"2026-11-0{night}T23:00:00+00:00" for night in (1, 2, 3)]
    assert [float(row["save_s"]) for row in rows] == [2.0, 3.0, 4.0]
    assert [row["kind"] for row in rows] == ["session", "session", "replace"]
    assert {row["mode"] for row in rows} == {"async"}
    assert "0009_cut.json" in error


def test_columns_that_the_documentation_gives_to_otava_are_there() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/keep-baselines.md").read_text()
    attributes = re.findall(r"attributes: \[(.*)\]", page)[0].split(", ")
    metrics = re.findall(r"^      (\w+): \{direction", page, re.MULTILINE)
    assert len(attributes) + len(metrics) > 8
    assert {"time", *attributes, *metrics} <= set(Point.__struct_fields__)


def test_number_in_the_list_names_a_scenario_too(filled: Path, run: Run) -> None:
    by_number = run("list", ID, "--csv", "--scenario", "2")[1]
    assert by_number == run("list", ID, "--csv", "--scenario", short_key(saved("async").scenario))[1]
    assert len(run("list", "--csv")[1].splitlines()) == 1 + 3 * 2 + 1


def test_list_refuses_what_is_not_there(filled: Path, run: Run) -> None:
    for arguments, problem in (
        (["list", "epyc"], "unknown hardware id 'epyc'"),
        (["list", "--scenario", "12"], "unknown scenario '12' (from --scenario)"),
        (["list", "--dir", "nowhere"], "there is no folder nowhere of baselines (from --dir)"),
    ):
        status, out, error = run(*arguments)
        assert (status, out) == (4, "")
        assert problem in error


def test_empty_folder_has_no_baselines(folder: Path, run: Run) -> None:
    (folder / "baselines").mkdir()
    assert run("list") == (0, "no baselines in baselines\n", "")


def test_id_with_nothing_but_damaged_files_is_not_passed_over(folder: Path, run: Run) -> None:
    (folder / "baselines" / ID).mkdir(parents=True)
    (folder / "baselines" / ID / "0001_x.json").touch()
    out = run("list")[1].splitlines()
    assert out == [
        ID,
        "  nothing that can be used",
        f"cannot be used: baselines/{ID}/0001_x.json: it is empty",
    ]


def test_command_loads_no_torch(filled: Path) -> None:
    program = (
        "import sys; from pytest_ckpt.plugin.command import main; main(['baseline', 'list']); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=filled, timeout=60, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_help_says_what_each_kind_does(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, words in (("add", "--example"), ("replace", "--reason TEXT"), ("list", "--csv")):
        with pytest.raises(SystemExit):
            main(["baseline", kind, "--help"])
        assert words in capsys.readouterr().out


def test_real_run_becomes_a_baseline_that_pytest_benchmark_compares(project: Project) -> None:
    project.pytest("--pyargs", "pytest_ckpt.suites", "--ckpt-rounds=4", "--benchmark-json=run.json").require(0)
    given = json.loads((project.path / "run.json").read_text())
    record = given["benchmarks"][0]["extra_info"]["ckpt"]
    add = ("pytest-ckpt", "baseline", "add", "run.json", "--reason=a real run")
    project.run(*add, "--hardware=the-id").require(0).lines.fnmatch_lines(
        ["baselines/the-id/0001_*.json: 2 scenarios of target disk"]
    )
    (path,) = (project.path / "baselines" / "the-id").iterdir()
    text = path.read_text()
    for name in (str(project.path), given["machine_info"]["python_compiler"]):
        assert name not in text
    assert f'"{record["host"]}"' not in text
    project.run("pytest-ckpt", "baseline", "list").require(0).lines.fnmatch_lines(
        ["the-id", "  1 * llama3-tiny * 2 * sync *", "  2 * llama3-tiny * 2 * async *"]
    )
    elsewhere = project.path / "elsewhere"
    elsewhere.mkdir()
    compare = ("pytest-benchmark", f"--storage={project.path / 'baselines'}", "compare")
    compared = project.run(*compare, cwd=elsewhere).require(0)
    assert sum(line.startswith("test_save[") for line in compared.out.splitlines()) == 3
