"""The table of an acceptance run, *promise x scenario*, and what each mark in it means, as lines."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from pytest_ckpt.records import PromiseResult
from pytest_ckpt.units import count

_CELL = 13
"""Widest column of a scenario; a longer name is folded, so that the promises stay readable."""
_MARKS = {"held": "held", "broken": "BROKEN", "known": "known", "not applicable": "n/a"}
_WORDS = {"held": "held", "broken": "broken", "known": "known of DCP", "not applicable": "not applicable"}


def promise_lines(results: Sequence[PromiseResult], explain: Callable[[str], Sequence[str]], width: int) -> list[str]:
    """Return the table and below it, for all that was not simply held, why.

    `explain` returns for the id of a known behaviour of DCP what it does, what that means and what helps.
    """
    scenarios = list(dict.fromkeys(result.scenario for result in results))
    promises = list(dict.fromkeys(result.promise for result in results))
    by_place = {(result.promise, result.scenario): result for result in results}
    lines = _table(promises, scenarios, by_place, width)
    lines += _reasons("broken", results)
    for known in dict.fromkeys(known for result in results for known in result.known):
        does, means, advice = explain(known)
        evidence = [result for result in results if known in result.known]
        lines.append(f"known of DCP: {known}: {does}")
        lines.append(f"  it means:  {means}")
        lines.append(f"  live with: {advice}")
        lines += [f"  seen:      {why}  [{where}]" for why, where in _merged(evidence)]
    lines += _reasons("not applicable", results)
    counts: Counter[str] = Counter(result.outcome for result in results)
    told = ", ".join(f"{counts[outcome]} {word}" for outcome, word in _WORDS.items() if counts[outcome])
    tried = f"{count(len(promises), 'promise')}, put to the test {count(len(results), 'time')}"
    lines.append(f"{tried} in {count(len(scenarios), 'scenario')}: {told}")
    return lines


def _table(
    promises: Sequence[str], scenarios: Sequence[str], by_place: Mapping[tuple[str, str], PromiseResult], width: int
) -> list[str]:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("promise", overflow="fold")
    for scenario in scenarios:
        table.add_column(scenario, overflow="fold", min_width=6, max_width=_CELL)
    for promise in promises:
        cells = [by_place.get((promise, scenario)) for scenario in scenarios]
        table.add_row(promise, *("" if cell is None else _MARKS[cell.outcome] for cell in cells))
    out = io.StringIO()
    Console(file=out, width=max(width, 60), color_system=None, highlight=False).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def _reasons(outcome: str, results: Sequence[PromiseResult]) -> list[str]:
    chosen = [result for result in results if result.outcome == outcome]
    lines = []
    for promise in dict.fromkeys(result.promise for result in chosen):
        for why, where in _merged([result for result in chosen if result.promise == promise]):
            first, *more = why.splitlines() or [""]
            lines += [f"{_WORDS[outcome]}: {promise}: {first}  [{where}]", *(f"  {line}" for line in more[:3])]
    return lines


def _merged(results: Sequence[PromiseResult]) -> list[tuple[str, str]]:
    """Return each reason once, with the scenarios in which it was given."""
    by_reason: dict[str, list[str]] = {}
    for result in results:
        by_reason.setdefault(result.why, []).append(result.scenario)
    return [(why, ", ".join(dict.fromkeys(scenarios))) for why, scenarios in by_reason.items()]
