"""Verdicts on the items of a whole run: what fails, what is said, and that terminal, JUnit and exit status agree."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_ckpt.judge.scenarios import full_key

from .project import Project, Result
from .stored import (
    FAST,
    ID,
    SLOW,
    SPREAD,
    USUAL,
    as_saved,
    comparisons,
    files,
    junit,
    night,
    properties,
    record_of,
    store,
    write_own,
)

TESTS = """
from pathlib import Path

import pytest

import own


def test_regresses(ckpt_save):
    ckpt_save(mode="sync", writer=own.regressing)


def test_improves(ckpt_save):
    ckpt_save(mode="async", writer=own.improving)


@pytest.mark.ckpt(tolerance="99.99%")
def test_holds(ckpt_save):
    ckpt_save(mode="sync", writer=own.holding)


def test_has_none(ckpt_save):
    ckpt_save(mode="sync", writer=own.unknown)


def test_has_an_example(ckpt_save):
    ckpt_save(mode="sync", writer=own.shown)


def test_has_another_method(ckpt_save):
    ckpt_save(mode="sync", writer=own.other_method)


def test_has_other_tracing(ckpt_save):
    ckpt_save(mode="sync", writer=own.untraced)


def test_of_two(ckpt_save):
    slow = ckpt_save(name="slow", mode="sync", writer=own.regressing)
    quick = ckpt_save(name="quick", mode="async", writer=own.improving)
    assert slow.verdicts[0].outcome == "regressed"
    assert quick.verdicts[0].outcome == "improved"
    Path("both").touch()


@pytest.mark.xfail(reason="known since Monday")
def test_is_known_to_regress(ckpt_save):
    ckpt_save(mode="sync", writer=own.regressing)


def test_has_an_assert_of_its_own(ckpt_save):
    record = ckpt_save(mode="sync", writer=own.regressing)
    assert record.save_s < 0, "of the user"


@pytest.mark.flaky(reruns=1)
def test_is_run_again(ckpt_save):
    ckpt_save(mode="sync", writer=own.regressing)


def test_cannot_be_told(ckpt_save):
    ckpt_save(mode="sync", writer=own.spread)


def test_saves_nothing():
    pass


def in_ranks(rank):
    pass


def test_has_ranks_of_its_own(ckpt_save, ckpt_world):
    ckpt_world.run(in_ranks)
    ckpt_save(mode="sync", writer=own.spread)
"""
WRITERS = ("regressing", "improving", "holding", "unknown", "shown", "other_method", "untraced", "spread")
RED = {"test_regresses", "test_of_two", "test_has_an_assert_of_its_own", "test_is_run_again"}


@dataclass
class Night:
    project: Project
    result: Result
    junit: Path
    figures: dict[str, Any]

    def verdicts(self, row: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = record_of(self.figures, row)["verdicts"]
        return found


@pytest.fixture(scope="module")
def first(module_project: Project) -> Night:
    """A run in which everything happens at once."""
    project = module_project
    write_own(project, *WRITERS)
    project.write("test_outcomes.py", TESTS)
    folder = project.path / "baselines"
    store(
        folder,
        "night1",
        as_saved(FAST, "regressing"),
        as_saved(SLOW, "improving", mode="async"),
        as_saved(USUAL, "holding"),
        as_saved(FAST, "other_method", method=0),
        as_saved(FAST, "untraced", tracing="off"),
        as_saved(SPREAD, "spread"),
    )
    store(folder, "night2", as_saved(FAST, "shown"), example=True)
    paths = (f"--junitxml={project.path / 'junit.xml'}", f"--benchmark-json={project.path / 'run.json'}")
    before = files(folder)
    result = night(project, *paths, "--deselect=test_outcomes.py::test_has_ranks_of_its_own")
    assert files(folder) == before
    return Night(project, result, project.path / "junit.xml", json.loads((project.path / "run.json").read_text()))


@pytest.fixture(scope="module")
def strict(first: Night) -> Night:
    """A part of it again, in which a baseline is required and nothing may stay undecided: the third night of that."""
    cache = first.project.path / ".pytest_cache/v/ckpt/undecided"
    counts = json.loads(cache.read_text())
    assert list(counts.values()) == [1]
    regressing = f"{ID} {full_key(as_saved(FAST, 'regressing').scenario)}"
    cache.write_text(json.dumps({**dict.fromkeys(counts, 2), regressing: 2}))
    path = first.project.path / "strict.xml"
    result = night(
        first.project,
        "--ckpt-baseline=require",
        "--ckpt-fail-on=undecided",
        "-k=has_none or has_an_example or another_method or cannot_be_told or ranks_of_its_own or test_regresses",
        f"--junitxml={path}",
    )
    return Night(first.project, result, path, first.project.last())


def test_exit_status_junit_and_summary_name_the_same_tests(first: Night) -> None:
    first.result.require(1)
    cases = junit(first.junit)
    assert {name for name, case in cases.items() if case.find("failure") is not None} == RED
    lines = first.result.out.splitlines()
    failed = {line.split()[1].partition("::")[2] for line in lines if line.startswith("FAILED ")}
    assert failed == RED
    assert "4 failed, 8 passed, 1 deselected, 1 xfailed, 1 rerun" in first.result.out


def test_regression_is_the_message_of_the_failure(first: Night) -> None:
    (verdict,) = first.verdicts("test_regresses")
    assert (verdict["outcome"], verdict["source"][:5]) == ("regressed", "0001_")
    failure = junit(first.junit)["test_regresses"].find("failure")
    assert failure is not None
    assert verdict["text"] in (failure.get("message") or "")
    first.result.lines.fnmatch_lines(
        [
            "*- Captured ckpt verdict call -*",
            "throughput regressed: *",
            "  now *",
            "  baseline *, median of 1 session*",
            "  change *",
            "  interval *",
            "  attribution *",
            "FAILED test_outcomes.py::test_regresses - Failed: throughput regressed: *",
        ]
    )


def test_junit_has_outcome_change_and_sentence_of_each_verdict(first: Night) -> None:
    cases = junit(first.junit)
    for test, outcome in (
        ("test_regresses", "regressed"),
        ("test_improves", "improved"),
        ("test_holds", "ok"),
        ("test_has_none", "no baseline"),
        ("test_has_an_example", "no baseline"),
        ("test_has_another_method", "not comparable"),
        ("test_has_other_tracing", "not comparable"),
        ("test_cannot_be_told", "undecided"),
        ("test_is_known_to_regress", "regressed"),
        ("test_has_an_assert_of_its_own", "regressed"),
    ):
        found = properties(cases[test])
        assert found["ckpt throughput outcome"] == outcome, test
        assert f"{outcome}" in found["ckpt throughput verdict"], test
        assert ("ckpt throughput change" in found) == (outcome not in ("no baseline", "not comparable")), test
    assert properties(cases["test_saves_nothing"]) == {}


def test_improvement_is_green_and_says_that_the_baseline_is_stale(first: Night) -> None:
    assert [verdict["outcome"] for verdict in first.verdicts("test_improves")] == ["improved", "improved"]
    first.result.lines.fnmatch_lines(["  throughput improved: *stale by a factor of three*--ckpt-baseline=save*"])


def test_margin_of_the_mark_counts_for_its_test_alone(first: Night) -> None:
    (verdict,) = first.verdicts("test_holds")
    assert (verdict["outcome"], verdict["tolerance"]) == ("ok", pytest.approx(0.9999))
    assert first.verdicts("test_regresses")[0]["tolerance"] == 0.1


def test_what_is_measured_in_another_way_is_named_and_not_judged(first: Night) -> None:
    first.result.lines.fnmatch_lines(
        [
            "ckpt: disk sync: throughput not comparable: the method of measuring differs: 1 now, 0 in the baseline",
            "ckpt: disk sync: throughput not comparable: tracing differs: spans now, off in the baseline",
        ]
    )


def test_example_judges_nobody(first: Night) -> None:
    assert first.verdicts("test_has_an_example")[0]["text"].endswith("only an example, which judges nobody")


def test_second_call_of_a_test_runs_after_the_first_regressed(first: Night) -> None:
    assert (first.project.path / "both").exists()
    found = properties(junit(first.junit)["test_of_two"])
    assert found["ckpt slow throughput outcome"] == "regressed"
    assert found["ckpt quick throughput outcome"] == "improved"
    first.result.lines.fnmatch_lines(["FAILED *test_of_two - Failed: slow: throughput regressed: *"])


def test_failing_assert_of_the_user_stays_what_is_reported(first: Night) -> None:
    first.result.lines.fnmatch_lines(["FAILED *test_has_an_assert_of_its_own - AssertionError: of the user*"])


def test_known_regression_is_an_expected_failure(first: Night) -> None:
    skipped = junit(first.junit)["test_is_known_to_regress"].find("skipped")
    assert skipped is not None
    assert skipped.get("type") == "pytest.xfail"


def test_running_again_does_not_make_a_regression_green(first: Night) -> None:
    first.result.lines.fnmatch_lines(["FAILED *test_is_run_again - Failed: throughput regressed: *"])


def test_undecided_gets_a_second_look_by_fresh_ranks_in_the_same_row(first: Night) -> None:
    (row,) = [row for row in first.figures["benchmarks"] if row["name"] == "test_cannot_be_told"]
    assert (row["stats"]["rounds"], len(row["stats"]["data"])) == (8, 8)
    record = row["extra_info"]["ckpt"]
    assert row["stats"]["data"] == [taken["save_s"] for taken in record["rounds"]]
    assert record["verdicts"][0]["looks"] == 2
    assert "4 of the rounds are a second look, by fresh ranks" in record["notes"]
    saves = (first.project.path / "pids-spread").read_text().split()[:10]
    assert saves[:5] == [saves[0]] * 5
    assert saves[5:] == [saves[5]] * 5
    assert saves[0] != saves[5]
    first.result.lines.fnmatch_lines(["*test_cannot_be_told: undecided, so a second look is taken"])


def test_only_what_is_undecided_is_looked_at_again(first: Night) -> None:
    rounds = {row["name"]: row["stats"]["rounds"] for row in first.figures["benchmarks"]}
    assert {name for name, count in rounds.items() if count != 4} == {"test_cannot_be_told"}
    assert first.result.out.count("a second look is taken") == 1


def test_without_a_baseline_required_tests_fail_and_name_the_nearest(strict: Night) -> None:
    strict.result.require(1)
    cases = junit(strict.junit)
    for test, words in (
        ("test_has_none", "the nearest that is held differs: writer is own:unknown, there own:"),
        ("test_has_an_example", "only an example, which judges nobody"),
        ("test_has_another_method", "the method of measuring differs"),
    ):
        failure = cases[test].find("failure")
        assert failure is not None, test
        message = failure.get("message") or ""
        assert words in message
        assert message.endswith("(--ckpt-baseline=require)")


def test_undecided_fails_where_that_is_asked_for(strict: Night) -> None:
    failure = junit(strict.junit)["test_cannot_be_told"].find("failure")
    assert failure is not None
    assert (failure.get("message") or "").startswith("Failed: throughput undecided: ")
    assert (failure.get("message") or "").endswith("(--ckpt-fail-on=undecided)")


def test_third_undecided_night_in_a_row_is_said(first: Night, strict: Night) -> None:
    assert "in a row" not in first.result.out
    strict.result.lines.fnmatch_lines(["  throughput undecided: *; undecided in 3 runs in a row: more rounds *"])


def test_night_that_could_be_told_starts_the_count_anew(strict: Night) -> None:
    counts = json.loads((strict.project.path / ".pytest_cache/v/ckpt/undecided").read_text())
    assert [key for key in counts if "own:regressing" in key] == []


def test_second_look_keeps_ranks_in_which_functions_of_the_test_ran(strict: Night) -> None:
    notes = record_of(strict.figures, "test_has_ranks_of_its_own[r1]")["notes"]
    assert (
        "4 of the rounds are a second look, by the same ranks, since functions of the test's own ran in them" in notes
    )
    saves = (strict.project.path / "pids-spread").read_text().split()
    assert len(saves) == 30
    assert len(set(saves[20:])) == 1


def test_number_of_comparisons_does_not_depend_on_what_is_selected(first: Night, strict: Night) -> None:
    """Throughput of six scenarios, and the stall of one: the example counts for nothing."""
    assert comparisons(first.result) == comparisons(strict.result) == 7


def test_header_names_id_and_what_is_stored(first: Night) -> None:
    first.result.lines.fnmatch_lines(
        [
            f"ckpt: hardware id of disk: {ID}; baseline: 1 session of 6 scenarios on 1 host in */baselines; "
            "check (default)",
            "ckpt: verdicts: tolerance 10 % of throughput (default); 7 comparisons a run, so that each bound *",
        ]
    )
