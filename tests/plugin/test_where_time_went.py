"""Probes, prediction, the trace, and `pytest-ckpt explain` and `probe`, as a person meets them."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pytest_ckpt.target.volumes import volumes

from .project import SUITE, Project, Result

WITHOUT_TORCH = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Missing())
from pytest_ckpt.plugin.command import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def run(module_project: Project) -> tuple[Project, Result]:
    options = ("--ckpt-rounds=3", "--ckpt-probe=64MiB", "--ckpt-trace=trace.json", "--benchmark-json=run.json")
    return module_project, module_project.pytest(*SUITE, *options).require(0)


@pytest.fixture
def rows(run: tuple[Project, Result]) -> dict[str, dict[str, Any]]:
    file = json.loads((run[0].path / "run.json").read_text())
    return {row["name"]: row["extra_info"]["ckpt"] for row in file["benchmarks"] if ":stall" not in row["name"]}


def test_prediction_is_printed_before_the_first_save_and_kept(
    run: tuple[Project, Result], rows: dict[str, dict[str, Any]]
) -> None:
    out = run[1].out
    run[1].lines.fnmatch_lines(
        [
            "ckpt: probes of disk, 2 ranks at once: *page cache * (not durable)*",
            "ckpt: predicted sync save into disk: * for llama3-tiny (11.0 MB), * for llama3-8b (96.4 GB)",
        ]
    )
    assert out.index("ckpt: predicted") < out.index("checkpoint saves")
    for record in rows.values():
        assert record["predicted_s"] > 0
        assert record["bounds"]["overlapped_s"] <= record["bounds"]["serial_s"]
        saves = sorted(r["save_s"] for r in record["rounds"])
        assert record["efficiency"] == pytest.approx(record["bounds"]["overlapped_s"] / saves[1])


def test_trace_holds_the_spans_of_every_rank_and_round(
    run: tuple[Project, Result], rows: dict[str, dict[str, Any]]
) -> None:
    events = json.loads((run[0].path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(names) == len(rows) == 2
    for process, record in zip(sorted(names), rows.values(), strict=True):
        for number, taken in enumerate(record["rounds"], 1):
            for rank, own in enumerate(taken["ranks"]):
                spans = [
                    (event["ts"], event["ts"] + event["dur"], event["name"])
                    for event in events
                    if event["ph"] == "X"
                    and (event["pid"], event["tid"], event["args"]["round"]) == (process, rank, number)
                ]
                assert spans == sorted(spans)
                assert all(end <= begin + 1 for (_, end, _), (begin, _, _) in pairwise(spans))
                assert (spans[-1][1] - spans[0][0]) / 1e6 == pytest.approx(taken["save_s"], abs=1e-5)
                assert {name for _, _, name in spans} == set(own["phases"])


def test_trace_into_a_missing_folder_is_refused_before_anything_runs(project: Project) -> None:
    result = project.pytest(*SUITE, "--ckpt-trace=missing/trace.json").require(4)
    result.lines.fnmatch_lines(["*--ckpt-trace 'missing/trace.json' cannot be written: *"])


def test_explain_prints_what_the_run_printed(run: tuple[Project, Result]) -> None:
    explained = run[0].run("pytest-ckpt", "explain", "run.json").require(0)
    printed = run[1].out[run[1].out.index("disk llama3-tiny r2 sync: ") :].partition("figures of this run")[0]
    names = {"test_save[disk-llama3-tiny-r2-sync]": "disk llama3-tiny r2 sync"}
    names["test_save[disk-llama3-tiny-r2-async]"] = "disk llama3-tiny r2 async"
    text = explained.out
    for name, short in names.items():
        text = text.replace(name, short)
    assert text.strip() == printed.strip()


def test_explain_verbosely_adds_bounds_probes_and_ranks(run: tuple[Project, Result]) -> None:
    result = run[0].run("pytest-ckpt", "explain", "-v").require(0)
    result.lines.fnmatch_lines(
        [
            "test_save*-sync?: where the time went (11.0 MB in *): *%)*",
            "  bounds: * if all overlapped (*), * one step after the other; this save *; efficiency * %",
            "  probes: write_direct *, write_synced *, write_buffered *, serialize *",
            "  rank 0: *; wrote 5.* MB; CPU *",
            "  rank 1: *",
        ]
    )


def test_explain_needs_no_torch(run: tuple[Project, Result]) -> None:
    project = run[0]
    script = project.write("without_torch.py", WITHOUT_TORCH)
    result = project.run(sys.executable, script, "explain", "run.json", "-v").require(0)
    assert result.out == project.run("pytest-ckpt", "explain", "run.json", "-v").out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        ("no json", "is no result file of this version"),
        ("[]", "is no result file of this version"),
        ('{"benchmarks": [{"name": "a", "group": "save", "extra_info": {"ckpt": {}}}]}', "is no result file of this"),
        ('{"benchmarks": [{"name": "a", "group": null, "extra_info": {}}]}', "holds no checkpoint saves"),
    ],
)
def test_explain_refuses_other_files_in_one_sentence(project: Project, text: str | None, words: str) -> None:
    if text is not None:
        project.write("other.json", text)
    result = project.run("pytest-ckpt", "explain", "other.json").require(4)
    (line,) = result.out.splitlines()
    assert line.startswith(f"pytest-ckpt: other.json {words}")
    assert "; give " in line


def test_explain_without_a_last_run_says_so(project: Project) -> None:
    result = project.run("pytest-ckpt", "explain").require(4)
    result.lines.fnmatch_lines(["pytest-ckpt: there is no last run in this folder *; give a result file"])


@pytest.mark.long
def test_run_without_probes_predicts_nothing_and_still_tells_where_the_time_went(project: Project) -> None:
    result = project.pytest(*SUITE, "--ckpt-probe=off", "--ckpt-mode=sync").require(0)
    assert "ckpt: prob" not in result.out
    assert "predicted" not in result.out
    result.lines.fnmatch_lines(["disk llama3-tiny r2 sync: where the time went (11.0 MB in *"])
    record = project.last()["benchmarks"][0]["extra_info"]["ckpt"]
    unknown = ("probes", "bounds", "predicted_s", "efficiency")
    assert [record[key] for key in unknown] == [None] * len(unknown)


def test_size_of_a_probe_that_is_none_is_refused(project: Project) -> None:
    result = project.pytest(*SUITE, "--ckpt-probe=64Miles").require(4)
    result.lines.fnmatch_lines(["*'64Miles' is no size: *, or off (from --ckpt-probe)"])


@pytest.mark.long
def test_other_volumes_are_measured_only_when_asked_for(project: Project, run: tuple[Project, Result]) -> None:
    unasked = run[0].last()["benchmarks"][0]["extra_info"]["ckpt"]["other_volumes"]
    assert [other["write_Bps"] for other in unasked] == [None] * len(unasked)
    if not volumes(beside=str(project.target), least_bytes=2**30):
        pytest.skip("this machine has no other writable volume")
    options = ("--ckpt-survey", "--ckpt-probe=64MiB", "--ckpt-mode=sync", "--ckpt-rounds=1")
    project.pytest(*SUITE, *options).require(0)
    asked = project.last()["benchmarks"][0]["extra_info"]["ckpt"]["other_volumes"]
    assert any(other["write_Bps"] for other in asked)
    assert not [left for other in asked for left in Path(other["mount"]).glob("pytest-ckpt-*")]


def test_probe_shows_honest_and_misleading_rates_and_cleans_up(project: Project) -> None:
    checkpoint = project.path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "__0_0.distcp").write_bytes(bytes(2**20))
    options = ("--size=64MiB", "--checkpoint", checkpoint)
    result = project.run("pytest-ckpt", "probe", project.target, *options).require(0)
    result.lines.fnmatch_lines(
        [
            f"{project.target}: * on *, * free",
            "probing with 2 processes, at most 67.1 MB or 3 s each",
            "  write_direct *",
            "  write_synced * fsync: what a durable save gets",
            "  write_buffered * lost in a crash",
            "  serialize * torch.save to nowhere*",
            "what people try first, and what misleads:",
            "  write_zeros * zeros compress",
            "  copy_folder * as `cp -r`: misleads*",
            "llama3-debug, 301 MB: a save in about *, at best *, staging of an async save *",
            "llama3-8b, 96.4 GB: a save in about *",
        ]
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--size=none"], "'none' is no size: * (from --size)"),
        (["--ranks=0"], "0 ranks (from --ranks) cannot write; *"),
        (["--size=64MiB", "--checkpoint=missing"], "checkpoint 'missing' (from --checkpoint) is no folder; *"),
    ],
)
def test_probe_refuses_what_it_cannot_do(project: Project, options: list[str], words: str) -> None:
    result = project.run("pytest-ckpt", "probe", project.target, *options).require(4)
    assert len(result.out.splitlines()) == 1
    result.lines.fnmatch_lines([f"pytest-ckpt: {words}"])


def test_probe_refuses_a_folder_that_is_not_there(project: Project) -> None:
    result = project.run("pytest-ckpt", "probe", "missing").require(4)
    result.lines.fnmatch_lines(["pytest-ckpt: target *missing* cannot be used*"])
