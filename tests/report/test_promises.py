from __future__ import annotations

from typing import Any

from pytest_ckpt.records import PromiseResult
from pytest_ckpt.report.promises import promise_lines

COMES_BACK, DURABLE, STEP = "state comes back", "what was saved is synced", "each is of its step"


def result(promise: str, scenario: str, outcome: Any, why: str = "", known: tuple[str, ...] = ()) -> PromiseResult:
    return PromiseResult(promise=promise, scenario=scenario, outcome=outcome, why=why, known=list(known))


def explain(known: str) -> tuple[str, str, str]:
    return f"{known} is done", "it costs data", "do without"


def lines(*results: PromiseResult, width: int = 100) -> list[str]:
    return promise_lines(results, explain, width)


def test_each_promise_is_a_row_and_each_scenario_a_column() -> None:
    told = lines(
        result(COMES_BACK, "disk-r2-sync", "held"),
        result(COMES_BACK, "disk-r2-async", "broken", "zeros came back"),
        result(DURABLE, "disk-r2-sync", "known", "0 of 9 bytes", ("not-durable",)),
        result(STEP, "disk-r2-async", "not applicable", "one rank"),
    )
    assert [line.split() for line in told[:4]] == [
        ["promise", "disk-r2-sync", "disk-r2-async"],
        [*COMES_BACK.split(), "held", "BROKEN"],
        [*DURABLE.split(), "known"],
        [*STEP.split(), "n/a"],
    ]
    assert told[3].index("n/a") == told[0].index("disk-r2-async")
    assert (
        told[-1]
        == "3 promises, put to the test 4 times in 2 scenarios: 1 held, 1 broken, 1 known of DCP, 1 not applicable"
    )


def test_where_all_is_held_there_is_the_table_and_the_count() -> None:
    told = lines(result(COMES_BACK, "disk-r2-sync", "held"), result(STEP, "disk-r2-sync", "held"))
    assert len(told) == 4
    assert told[-1] == "2 promises, put to the test 2 times in 1 scenario: 2 held"


def test_broken_promise_has_its_reason_and_where() -> None:
    told = lines(result(COMES_BACK, "disk-r2-sync", "broken", "zeros came back\n  of 3\n  tensors\n  on\n  rank 1"))
    assert told[2:-1] == [
        f"broken: {COMES_BACK}: zeros came back  [disk-r2-sync]",
        "    of 3",
        "    tensors",
        "    on",
    ]


def test_the_same_reason_in_several_scenarios_is_told_once() -> None:
    told = lines(
        result(COMES_BACK, "a", "not applicable", "one rank"),
        result(COMES_BACK, "b", "not applicable", "one rank"),
        result(COMES_BACK, "c", "not applicable", "no disk"),
    )
    assert [line for line in told if line.startswith("not applicable")] == [
        f"not applicable: {COMES_BACK}: one rank  [a, b]",
        f"not applicable: {COMES_BACK}: no disk  [c]",
    ]


def test_known_behaviour_is_told_once_with_what_it_means_and_what_helps_and_all_that_was_seen() -> None:
    told = lines(
        result(DURABLE, "a", "known", "0 of 9 bytes", ("not-durable",)),
        result(DURABLE, "b", "known", "0 of 8 bytes", ("not-durable",)),
    )
    assert told[2:-1] == [
        "known of DCP: not-durable: not-durable is done",
        "  it means:  it costs data",
        "  live with: do without",
        "  seen:      0 of 9 bytes  [a]",
        "  seen:      0 of 8 bytes  [b]",
    ]


def test_broken_comes_before_known_and_that_before_what_does_not_apply() -> None:
    told = lines(
        result(STEP, "a", "not applicable", "one rank"),
        result(DURABLE, "a", "known", "0 of 9 bytes", ("not-durable",)),
        result(COMES_BACK, "a", "broken", "zeros"),
    )
    assert [line.split(":")[0] for line in told if line[0] != " "][4:-1] == ["broken", "known of DCP", "not applicable"]


def test_known_behaviour_that_was_made_a_failure_is_explained_too() -> None:
    told = lines(result(DURABLE, "a", "broken", "known of DCP, made a failure", ("not-durable",)))
    assert any(line.startswith(f"broken: {DURABLE}") for line in told)
    assert "  live with: do without" in told


def test_names_are_never_cut_however_narrow_the_screen() -> None:
    many = [result("a promise with a name that is rather long", f"disk-r2-mode-{n}", "held") for n in range(5)]
    told = lines(*many, width=60)
    assert max(map(len, told)) <= 60
    table = "".join(told[:-1]).replace(" ", "")
    assert table.count("held") == 5
    assert "…" not in table


def test_reason_without_words_is_a_line_all_the_same() -> None:
    assert f"broken: {STEP}:   [a]" in lines(result(STEP, "a", "broken"))
