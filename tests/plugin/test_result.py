"""pytest-benchmark's figures are the ranks' figures, and the result file holds what docs/reference promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .project import SAVING_TEST, SUITE, Project, Result


@pytest.fixture(scope="module")
def run(module_project: Project) -> tuple[Project, Result]:
    return module_project, module_project.pytest(*SUITE, "--ckpt-rounds=3", "--benchmark-json=run.json").require(0)


@pytest.fixture(scope="module")
def rows(run: tuple[Project, Result]) -> dict[str, Any]:
    file = json.loads((run[0].path / "run.json").read_text())
    return {row["name"]: row for row in file["benchmarks"]}


def test_the_rows_are_named_without_paths(rows: dict[str, Any]) -> None:
    assert list(rows) == [
        "test_save[disk-llama3-tiny-r2-sync]",
        "test_save[disk-llama3-tiny-r2-async]",
        "test_save[disk-llama3-tiny-r2-async]:stall",
    ]
    for row in rows.values():
        assert row["params"] == {
            "ckpt_target": "disk",
            "ckpt_model": "llama3-tiny",
            "ckpt_world": 2,
            "ckpt_mode": row["extra_info"]["ckpt"]["scenario"]["mode"],
        }


def test_the_save_rows_hold_exactly_the_seconds_of_the_ranks(rows: dict[str, Any]) -> None:
    for name, row in rows.items():
        key = "stall_s" if name.endswith(":stall") else "save_s"
        assert row["stats"]["data"] == [round_[key] for round_ in row["extra_info"]["ckpt"]["rounds"]]
        assert row["group"] == key.removesuffix("_s")
        assert row["stats"]["rounds"] == 3


def test_an_async_save_blocks_training_for_less_than_it_lasts(rows: dict[str, Any]) -> None:
    for round_ in rows["test_save[disk-llama3-tiny-r2-async]"]["extra_info"]["ckpt"]["rounds"]:
        assert 0 < round_["stall_s"] < round_["save_s"]
    for round_ in rows["test_save[disk-llama3-tiny-r2-sync]"]["extra_info"]["ckpt"]["rounds"]:
        assert round_["stall_s"] == round_["save_s"]


def test_each_row_holds_the_promised_keys(rows: dict[str, Any], run: tuple[Project, Result]) -> None:
    for row in rows.values():
        ckpt = row["extra_info"]["ckpt"]
        assert ckpt["format"] == 1
        assert ckpt["method"] >= 1
        assert set(ckpt["scenario"]) >= {
            *("engine", "mode", "writer", "options", "model", "state", "params"),
            *("world_size", "mesh", "device", "share"),
        }
        assert set(ckpt["environment"]) >= {"torch", "driver", "kernel", "plugin", "python"}
        assert ckpt["target"].items() >= {"label": "disk", "kind": "path"}.items()
        assert ckpt["logical_bytes"] == 11_017_728
        assert ckpt["logical_bytes"] < ckpt["stored_bytes"] < ckpt["folder_bytes"]
        assert ckpt["first_save_s"] > 0
        assert ckpt["host"]
        assert ckpt["time"].endswith("+00:00")
        for round_ in ckpt["rounds"]:
            assert round_["throughput_Bps"] == ckpt["logical_bytes"] / round_["save_s"]
            assert round_["peak_rss_bytes"] > 0
            assert len(round_["ranks"]) == 2
        assert str(run[0].target) not in json.dumps(row)


def test_the_last_run_is_kept_in_the_cache_and_its_path_printed(
    run: tuple[Project, Result], rows: dict[str, Any]
) -> None:
    project, result = run
    assert {row["name"]: row for row in project.last()["benchmarks"]} == rows
    result.lines.fnmatch_lines([f"figures of this run: {project.path}/.pytest_cache/d/ckpt/last.json"])


def test_the_header_says_what_was_chosen_and_why(run: tuple[Project, Result]) -> None:
    project, result = run
    result.lines.fnmatch_lines(
        [
            "ckpt: torch 2.*, cpu (no CUDA device found), gloo, ranks 2 (default on cpu)",
            "ckpt: 3 rounds after one warm-up save, at most 15 min a scenario; engine dcp*, writer File*every*",
            f"ckpt: target disk = {project.target} (* on /*; * free)",
            "ckpt: model llama3-tiny, fp32-adamw (default): 11.0 MB a checkpoint; needs at most*: fits",
        ]
    )


def test_our_table_takes_the_place_of_the_wide_one(run: tuple[Project, Result]) -> None:
    run[1].lines.fnmatch_lines(
        [
            "*- checkpoint saves -*",
            "target * model * ranks * mode * rounds * save * stall * GB/s * first save",
            "disk * llama3-tiny * 2 * sync * 3 *",
            "disk * llama3-tiny * 2 * async * 3 *",
            "figures of this run: *",
        ]
    )
    run[1].lines.no_fnmatch_line("*StdDev*")


def test_results_survive_a_later_crash_and_the_next_run_names_what_it_left(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("test_it.py", SAVING_TEST + "\ndef test_crash():\n    import os\n    os._exit(7)\n")
    crashed = project.pytest("--ckpt-mode=sync")
    assert (crashed.status, crashed.processes) == (7, [])
    assert [row["name"] for row in project.last()["benchmarks"]] == ["test_save[disk-llama3-tiny-r2-sync]"]
    (left,) = crashed.in_target
    project.pytest("--co").lines.fnmatch_lines([f"ckpt: left by a killed run: {project.target}/{left} (*"])
    cleaned = project.run("pytest-ckpt", "clean", project.target).require(0)
    cleaned.lines.fnmatch_lines([f"removed {project.target}/{left} (*, dead)", "1 removed, * freed, 0 left in *"])
    assert project.last()["benchmarks"]
