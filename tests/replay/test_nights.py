"""A nightly job over a week, on a volume that the kernel throttles: red on the nights when something is wrong."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..plugin.project import Result
from .nights import Nights, machine

GROW = "--ckpt-baseline=grow"
STATE, USUAL_BPS = "weights-bf16", 133_000_000
"""50 MB at a third of the rate of the runs by hand: nights of seconds."""


@dataclass
class Week:
    nights: Nights
    grown: list[Result]
    quiet: Result
    throttled: Result
    junit: Path
    results: Path


@pytest.fixture(scope="module")
def week(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Week]:
    """Seven nights of one and the same command."""
    with machine(tmp_path_factory.mktemp("nights"), STATE, USUAL_BPS) as nights:
        grown = [nights.night(GROW) for _ in range(5)]
        quiet = nights.night(GROW)
        junit, results = nights.project.path / "junit.xml", nights.project.path / "run.json"
        reports = (f"--junitxml={junit}", f"--benchmark-json={results}")
        throttled = nights.night(GROW, *reports, slow_storage=True)
        yield Week(nights, grown, quiet, throttled, junit, results)


def test_first_five_nights_grow_the_baseline_and_are_green(week: Week) -> None:
    for number, night in enumerate(week.grown, 1):
        assert night.status == 0, night.out
        assert f"(session {number}{' of 5' if number < 5 else ''})" in night.out
    assert len(week.nights.stored()) == 5


def test_quiet_night_is_green_and_adds_nothing(week: Week) -> None:
    assert week.quiet.status == 0, week.quiet.out
    assert "throughput regressed" not in week.quiet.out
    assert "baseline saved" not in week.quiet.out
    assert "baseline: 5 sessions of 1 scenario on 1 host" in week.quiet.out


def test_throttled_night_is_red_and_says_that_the_storage_fell(week: Week) -> None:
    assert week.throttled.status == 1, week.throttled.out
    (line,) = [line for line in week.throttled.out.splitlines() if line.startswith("  throughput regressed")]
    assert "storage slower" in line
    assert "phase sync grew most" in line
    week.throttled.lines.fnmatch_lines(["FAILED *test_save*throughput regressed*"])


def test_efficiency_of_a_throttled_night_has_not_fallen(week: Week) -> None:
    assert "efficiency regressed" not in week.throttled.out


def test_junit_and_exit_status_of_the_throttled_night_agree(week: Week) -> None:
    suite = ElementTree.parse(week.junit).getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("1", "1", "0")
    properties = {p.get("name"): p.get("value") for p in suite.iter("property")}
    assert properties["ckpt throughput outcome"] == "regressed"
    assert float(properties["ckpt throughput change"] or 0) == pytest.approx(-0.5, abs=0.1)
    (failure,) = suite.iter("failure")
    assert "throughput regressed" in (failure.get("message") or "")


def test_verdict_is_in_the_result_file_of_the_red_night(week: Week) -> None:
    (row,) = json.loads(week.results.read_text())["benchmarks"]
    verdict = row["extra_info"]["ckpt"]["verdicts"][0]
    assert verdict["outcome"] == "regressed"
    assert verdict["change"] == pytest.approx(-0.5, abs=0.1)
    assert verdict["interval"][0] <= verdict["change"] <= verdict["interval"][1]
    assert verdict["attribution"].startswith("storage slower")
    assert verdict["source"].startswith("0001_")


def test_software_that_became_slower_is_red_and_its_phase_is_named(week: Week) -> None:
    night = week.nights.night(slow_software=True)
    assert night.status == 1, night.out
    (line,) = [line for line in night.out.splitlines() if line.startswith("  throughput regressed")]
    assert "software slower: the probe held" in line
    assert "phase write grew most" in line


def test_volume_that_was_not_mounted_is_red_where_a_baseline_is_required_or_grows(week: Week) -> None:
    for mode in ("require", "grow"):
        night = week.nights.unmounted_night(f"--ckpt-baseline={mode}", "--ckpt-rounds=4")
        assert night.status == 1, night.out
        assert "storage class: loop there" in night.out
    assert len(week.nights.stored()) == 5


def test_volume_that_was_not_mounted_is_said_where_baselines_are_only_checked(week: Week) -> None:
    night = week.nights.unmounted_night("--ckpt-rounds=4")
    assert night.status == 0, night.out
    night.lines.fnmatch_lines(["ckpt: disk sync: no baseline of this scenario on *: it is held under *loop there*"])


@pytest.mark.long
def test_regressed_night_is_not_saved_unless_it_is_forced(week: Week) -> None:
    refused = week.nights.night("--ckpt-baseline=save", slow_storage=True)
    assert refused.status == 1, refused.out
    assert "not saved as baseline, since it regressed" in refused.out
    assert len(week.nights.stored()) == 5
    forced = week.nights.night("--ckpt-baseline=save", "--ckpt-baseline-force", slow_storage=True)
    assert forced.status == 0, forced.out
    (*_, last) = week.nights.stored()
    assert last.name.startswith("0006_")
    last.unlink()
