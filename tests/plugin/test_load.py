"""Loads, as a user runs them: rows, table, verdicts, and what is refused or skipped in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .project import SAVING_TEST, SUITE, Project, Result

LOADS = (*SUITE, "-m", "ckpt_load")
ONE = """
import pytest


def test_load(ckpt_load, ckpt_target, ckpt_model, ckpt_world):
    record = ckpt_load({})
    assert record.scenario.is_load
"""

LOSING_WRITER = """
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter


class Losing(FileSystemWriter):
    def write_data(self, plan, planner):
        resolve = planner.resolve_data

        def resolve_data(item):
            data = resolve(item)
            if item.index.fqn == "app.model.norm.weight" and data.numel():
                data = data.clone()
                data.view(-1)[0] += 1
            return data

        planner.resolve_data = resolve_data
        return super().write_data(plan, planner)


def losing(path):
    return Losing(path)


def own_format(path):
    return HuggingFaceStorageWriter(path, save_distributed=True)
"""


@pytest.fixture(scope="module")
def run(module_project: Project) -> tuple[Project, Result]:
    return module_project, module_project.pytest(*LOADS, "--benchmark-json=run.json", "-v").require(0)


@pytest.fixture(scope="module")
def rows(run: tuple[Project, Result]) -> dict[str, Any]:
    file = json.loads((run[0].path / "run.json").read_text())
    return {row["name"]: row for row in file["benchmarks"]}


def test_mark_selects_the_suite_of_loads_and_each_is_one_row(rows: dict[str, Any]) -> None:
    assert list(rows) == [
        "test_load[disk-llama3-tiny-r2-warm]",
        "test_load[disk-llama3-tiny-r2-cold]",
        "test_load[disk-llama3-tiny-r2-warm-resharded]",
        "test_load[disk-llama3-tiny-r2-cold-resharded]",
    ]
    assert {row["group"] for row in rows.values()} == {"load"}


def test_rows_hold_the_ranks_own_seconds_and_what_identifies_a_load(rows: dict[str, Any]) -> None:
    for name, row in rows.items():
        ckpt = row["extra_info"]["ckpt"]
        assert row["stats"]["data"] == [taken["save_s"] for taken in ckpt["rounds"]]
        assert ckpt["scenario"]["mode"] == ("load-cold" if "cold" in name else "load-warm")
        assert ckpt["scenario"]["options"] == ({"saved_ranks": 4} if "resharded" in name else {})
        assert ckpt["scenario"]["world_size"] == len(ckpt["rounds"][0]["ranks"]) == 2
        assert (ckpt["findings"], ckpt["probes"], ckpt["bounds"], ckpt["predicted_s"]) == ([], None, None, None)
        assert ckpt["logical_bytes"] == 11_017_728
        for taken in ckpt["rounds"]:
            assert taken["stall_s"] == taken["save_s"]
            assert sum(taken["phases"].values()) == pytest.approx(taken["save_s"])
        assert [note.partition(":")[0] for note in ckpt["notes"]] == ["cold"] * ("cold" in name)


def test_table_and_the_lines_below_it_tell_of_loads(run: tuple[Project, Result]) -> None:
    run[1].lines.fnmatch_lines(
        [
            "*- checkpoint loads -*",
            "target *model *ranks *saved by *mode *rounds *load *(min .. max) *GB/s *first load",
            "disk *llama3-tiny *2 *2 *load-warm *2 *",
            "disk *llama3-tiny *2 *4 *load-cold *2 *",
            "disk llama3-tiny r2 load-warm: where the time went (11.0 MB in *read *",
            "  no baseline of this scenario on *",
            "  rank 0: *read from storage*",
            "load-cold: cold: *",
        ]
    )
    run[1].lines.no_fnmatch_line("*probes of*")


def test_explain_tells_of_loads(run: tuple[Project, Result]) -> None:
    explained = run[0].run("pytest-ckpt", "explain", "run.json")
    explained.lines.fnmatch_lines(["test_load*cold-resharded*: where the time went (11.0 MB in *read *"])
    explained.lines.no_fnmatch_line("*bottleneck*")


def test_loads_do_not_run_where_nobody_asks_for_them(project: Project) -> None:
    alone = project.pytest("--co", "-q", *SUITE)
    alone.lines.fnmatch_lines(["*::test_save*"])
    alone.lines.no_fnmatch_line("*::test_load*")
    both = project.pytest("--co", "-q", *SUITE, "-m", "ckpt_load or ckpt_save")
    both.lines.fnmatch_lines_random(["*::test_save*", "*::test_load*"])
    suites = Path(__file__).parents[2] / "suites"
    named = project.pytest("--co", "-q", suites / "test_load.py")
    named.lines.fnmatch_lines(["*::test_load*"])


@pytest.mark.long
def test_load_is_judged_against_its_own_baseline(project: Project) -> None:
    project.write("test_it.py", SAVING_TEST + ONE.replace("{}", ""))
    given = ("--ckpt-mode=sync", "--ckpt-rounds=4", "--ckpt-tolerance=90%")
    project.pytest(*given, "--ckpt-baseline=save").require(0).lines.fnmatch_lines(
        ["*- checkpoint saves and loads -*", "baseline saved: *"]
    )
    (stored,) = project.path.glob("baselines/*/0001_*.json")
    assert [row["group"] for row in json.loads(stored.read_text())["benchmarks"]] == ["save", "load"]
    project.pytest(*given)
    verdicts = [row["extra_info"]["ckpt"]["verdicts"] for row in project.last()["benchmarks"]]
    assert [[v["metric"] for v in own] for own in verdicts] == [["throughput", "efficiency"], ["throughput"]]
    assert {v["outcome"] for own in verdicts for v in own} <= {"ok", "improved", "undecided", "regressed"}


@pytest.mark.parametrize(
    ("call", "status", "message"),
    [
        ("mode='hot'", 4, "unknown mode 'hot' (from ckpt_load); known, nearest first: *"),
        ("saved_ranks=0", 4, "0 saved_ranks (from ckpt_load) cannot save; write 1 or more"),
        ("model='llama9'", 4, "unknown model 'llama9' (from ckpt_load)*"),
        pytest.param(
            "name='a'); ckpt_load(name='a'",
            4,
            "a second ckpt_load named 'a' in one test: *ckpt_load(name='eight-*",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(project: Project, call: str, status: int, message: str) -> None:
    project.write("test_it.py", ONE.replace("{}", call))
    project.pytest().require(status).lines.fnmatch_lines([message])


@pytest.mark.parametrize(
    ("given", "status", "message"),
    [
        ("--ckpt-writer=writers:losing", 1, "what was loaded is not what was saved: app.model.norm.weight (1 of 84 *"),
        ("--ckpt-writer-opt=serialization_format=safetensors", 4, "serialization_format=safetensors *none of DCP*"),
        pytest.param(
            "--ckpt-writer=writers:own_format",
            4,
            "the writer left no .metadata, so dcp.load*--ckpt-reader=package.module:function*",
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_writer_whose_checkpoint_is_not_what_was_saved_or_cannot_be_loaded(
    project: Project, given: str, status: int, message: str
) -> None:
    project.write("writers.py", LOSING_WRITER)
    project.write("test_it.py", ONE.replace("{}", ""))
    state = ["--ckpt-state=weights-bf16"] if "own_format" in given else []
    project.pytest(given, "-p", "no:randomly", *state).require(status).lines.fnmatch_lines([message])


HUGGING_FACE = "--ckpt-writer=HuggingFaceStorageWriter"
READERS = """
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader


def own_reader(path):
    return HuggingFaceStorageReader(path)


def no_reader(path):
    return path
"""


@pytest.mark.parametrize(
    ("given", "reader"),
    [
        pytest.param([HUGGING_FACE], None, marks=pytest.mark.long),
        pytest.param([HUGGING_FACE, "--ckpt-writer-opt=enable_consolidation=on"], None, marks=pytest.mark.long),
        (["--ckpt-writer=writers:own_format", "--ckpt-reader=readers:own_reader"], "readers:own_reader"),
        pytest.param(
            ["--ckpt-writer=writers:own_format", "--ckpt-reader=HuggingFaceStorageReader"],
            "HuggingFaceStorageReader",
            marks=pytest.mark.long,
        ),
    ],
)
def test_format_with_a_reader_of_its_own_is_loaded_by_it_and_comes_back_whole(
    project: Project, given: list[str], reader: str | None
) -> None:
    project.write("writers.py", LOSING_WRITER)
    project.write("readers.py", READERS)
    project.write("test_it.py", ONE.replace("{}", "saved_ranks=1"))
    project.pytest("--ckpt-state=weights-bf16", "--ckpt-rounds=2", *given).require(0)
    (row,) = project.last()["benchmarks"]
    assert row["extra_info"]["ckpt"]["scenario"]["options"].get("reader") == reader


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--ckpt-reader=HuggingFaceReader"], "unknown reader 'HuggingFaceReader' (from --ckpt-reader, which takes *"),
        (
            ["--ckpt-reader=readers:no_reader"],
            "reader readers:no_reader returned 'str'; it must return a *StorageReader*",
        ),
        (
            ["--ckpt-reader=FileSystemReader", "--ckpt-engine=readers:own_reader"],
            "reader 'FileSystemReader' (from --ckpt-reader) is for loads by DCP, and engine readers:own_reader *",
        ),
    ],
)
def test_reader_that_cannot_be_used_is_refused_in_a_sentence(project: Project, given: list[str], message: str) -> None:
    project.write("readers.py", READERS)
    project.write("test_it.py", ONE.replace("{}", ""))
    project.pytest(*given).require(4).lines.fnmatch_lines([f"*{message}"])


def test_cold_load_of_a_target_in_memory_is_skipped_with_the_reason(project: Project) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no tmpfs here")
    project.write("test_it.py", ONE.replace("{}", "mode='cold'"))
    skipped = project.pytest("--ckpt-target=shm=/dev/shm", "-rs", target=False)
    assert (skipped.status, skipped.processes) == (0, []), skipped.out
    skipped.lines.fnmatch_lines(["*target shm is tmpfs, which is memory: there is no colder way to read it"])
