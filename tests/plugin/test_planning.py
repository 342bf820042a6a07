"""Planning on paper, as a user runs it: rows, table, growth, verdicts, and what is refused or skipped in a sentence."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from .project import SUITE, Project, Result

SIZES = (2, 4, 8, 16)
PLANNING = (*SUITE, "-m", "ckpt_planning", *(f"--ckpt-plan-ranks={size}" for size in SIZES))

QUADRATIC = """
from itertools import product

from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


class Quadratic(DefaultSavePlanner):
    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        for value in metadata.state_dict_metadata.values():
            if isinstance(value, TensorStorageMetadata):
                for one, other in product(value.chunks, repeat=2):
                    assert one is other or not overlap(one, other)
        return plans, metadata


def overlap(one, other):
    boxes = zip(one.offsets, one.sizes, other.offsets, other.sizes)
    return all(a < b + other_size and b < a + size for a, size, b, other_size in boxes)
"""
PLANTED = """
import planner
import pytest


@pytest.mark.parametrize("ranks", [16, 32, 64, 128])
def test_planning(ckpt_plan, ckpt_model, ranks):
    ckpt_plan(ranks=ranks, planner=planner.Quadratic)


def test_growth(ckpt_plan, ckpt_model):
    growth = ckpt_plan.growth(planner=planner.Quadratic)
    assert growth.steepest.step == "global_plan"
    assert not growth.is_too_steep, str(growth)
"""
OWN = """
from pytest_ckpt.records import SaveRecord


def test_needs_no_dimension(ckpt_plan):
    record = ckpt_plan(ranks=3, dedup_save_to_lowest_rank=False)
    assert isinstance(record, SaveRecord)
    assert (record.scenario.model, record.scenario.options) == ("llama3-8b", {})
"""
WRONG = """
def test_wrong_option(ckpt_plan):
    ckpt_plan(ranks=2, enable_plan_cashing=True)


def test_no_ranks(ckpt_plan):
    ckpt_plan(ranks=0)


def test_own_planner_that_cannot_travel(ckpt_plan):
    ckpt_plan(ranks=2, planner=lambda: None)
"""


@pytest.fixture(scope="module")
def run(module_project: Project) -> tuple[Project, Result]:
    result = module_project.pytest(
        *PLANNING, "-k", "plain", "--ckpt-rounds=5", "--ckpt-baseline=save", "--benchmark-json=run.json"
    )
    return module_project, result.require(0)


@pytest.fixture(scope="module")
def rows(run: tuple[Project, Result]) -> dict[str, Any]:
    file = json.loads((run[0].path / "run.json").read_text())
    return {row["name"]: row for row in file["benchmarks"]}


def test_mark_selects_the_suite_and_each_number_of_ranks_is_one_row(rows: dict[str, Any]) -> None:
    assert list(rows) == [f"test_planning[llama3-tiny-r{size}-plain]" for size in SIZES]
    assert {row["group"] for row in rows.values()} == {"plan"}


def test_rows_say_that_ranks_were_on_paper_and_hold_the_steps(rows: dict[str, Any]) -> None:
    for size, row in zip(SIZES, rows.values(), strict=True):
        ckpt = row["extra_info"]["ckpt"]
        assert row["stats"]["data"] == [taken["save_s"] for taken in ckpt["rounds"]]
        assert (ckpt["scenario"]["mode"], ckpt["scenario"]["world_size"]) == ("plan", size)
        assert ckpt["notes"] == ["planning only: ranks on paper, played by one process; no network and no storage"]
        assert (ckpt["findings"], ckpt["probes"], ckpt["bounds"], ckpt["stored_bytes"]) == ([], None, None, None)
        planning = ckpt["planning"]
        assert planning["checked_ranks"] == sorted({0, 1, size // 2, size - 1})
        assert planning["gathered_bytes"] == pytest.approx(size * planning["plan_bytes"], abs=size)
        assert planning["first_phases"].keys() == ckpt["rounds"][0]["phases"].keys()
        for taken in ckpt["rounds"]:
            assert sum(taken["phases"].values()) == pytest.approx(taken["save_s"])


def test_header_table_and_sentences_tell_what_planning_costs(run: tuple[Project, Result]) -> None:
    run[1].lines.fnmatch_lines(
        [
            "ckpt: planning only, on paper: llama3-tiny, fp32-adamw, full shard over 2, 4, 8, 16 ranks by one *",
            "*- checkpoint planning -*",
            "model *ranks *rounds *planning *local plan *gather *global plan *scatter *results *metadata *broadcast *",
            *(f"llama3-tiny  {size} *5 *B" for size in SIZES),
            "seconds are CPU seconds of rank 0*",
            "llama3-tiny plan: at 16 ranks each save plans for * before the first byte is written, *",
            "llama3-tiny plan: *",
            "plan: planning only: ranks on paper*",
        ]
    )
    # On a fast machine no step of so small a plan takes long enough.
    grown = [r"exponent .* ms at 2 ranks, .* ms at 16", r"no step takes 10\.0 ms with 16 ranks: growth is not told"]
    assert any(re.search(line, run[1].out) for line in grown)
    assert "target disk" not in run[1].out, "nothing is saved, so that nothing is said of space"


@pytest.mark.long
def test_planning_is_judged_like_a_save(run: tuple[Project, Result]) -> None:
    project = run[0]
    (stored,) = (project.path / "baselines").rglob("*.json")
    document = json.loads(stored.read_text())
    again = (*PLANNING, "-k", "test_planning and r16-plain", "--ckpt-rounds=5")
    for row in document["benchmarks"]:  # as if it had once been four times faster
        for taken in row["extra_info"]["ckpt"]["rounds"]:
            for name in ("save_s", "stall_s"):
                taken[name] /= 4
        row["stats"]["data"] = [taken["save_s"] for taken in row["extra_info"]["ckpt"]["rounds"]]
    stored.write_text(json.dumps(document))
    failed = project.pytest(*again).require(1)
    failed.lines.fnmatch_lines(["*planning regressed: *phase * grew most*"])


def test_suite_of_saves_plans_nothing_on_paper_unless_asked(project: Project) -> None:
    result = project.pytest(*SUITE, "--collect-only", "-q").require(0)
    assert "test_planning" not in result.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ckpt-plan-ranks=0"], "*'0' (from --ckpt-plan-ranks) is no whole number above zero*"),
        (["--ckpt-plan-ranks=9999999"], "*9999999 ranks on paper needs up to * of memory and * are available; *"),
        (["--ckpt-model=json:loads"], "*json.loads is your own model, and planning on paper needs *"),
    ],
)
def test_what_cannot_be_planned_is_refused_before_anything_runs(
    project: Project, arguments: list[str], sentence: str
) -> None:
    result = project.pytest(*SUITE, "-m", "ckpt_planning", *arguments)
    assert result.status == 4
    result.lines.fnmatch_lines([sentence])


@pytest.mark.long
def test_test_of_ones_own_needs_no_dimension_and_has_a_model_of_its_own(project: Project) -> None:
    project.write("test_own.py", OWN)
    project.run(sys.executable, "-m", "pytest", "test_own.py", "--ckpt-rounds=1").require(0)


def test_wrong_calls_are_refused_in_a_sentence(project: Project) -> None:
    project.write("test_wrong.py", WRONG)
    result = project.pytest("test_wrong.py").require(4)
    result.lines.fnmatch_lines(
        [
            "*'enable_plan_cashing'*enable_plan_caching*",
            "*0 ranks (from ckpt_plan) plan nothing; write 1 or more*",
            "*planner *<lambda>* is a lambda*",
            "*3 failed*",
        ]
    )


def test_growth_of_fewer_than_four_numbers_of_ranks_is_skipped_with_the_reason(project: Project) -> None:
    result = project.pytest(*SUITE, "-m", "ckpt_planning", "-k", "growth and plain", "-rs").require(0)
    result.lines.fnmatch_lines(
        ["SKIPPED*growth needs 4 numbers of ranks measured in this session, and of llama3-tiny*"]
    )


@pytest.mark.long
@pytest.mark.timeout(300)
def test_planted_quadratic_step_fails_its_test_and_is_named(project: Project) -> None:
    project.write("planner.py", QUADRATIC)
    project.write("test_planted.py", PLANTED)
    result = project.pytest("test_planted.py").require(1)
    result.lines.fnmatch_lines(["*too steep (limit 1.6): global_plan grows quadratically: exponent *"])
