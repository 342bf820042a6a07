"""The verdict on the test item: it fails the test that ran the scenario, so that JUnit and exit status agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from pytest_ckpt.judge.metrics import METRICS
from pytest_ckpt.records import SaveRecord, Verdict

_FAILURES: pytest.StashKey[list[str]] = pytest.StashKey()
_SHOW = {metric.name: metric.show for metric in METRICS}


def note_verdicts(item: pytest.Item, name: str | None, record: SaveRecord, failures: Sequence[str]) -> None:
    """Put the verdicts on `item`: properties for JUnit, a section for its report, and `failures` for its outcome.

    What failed stays failed when the item is run again: a test that is repeated until it is green judges nothing.
    """
    prefix = f"ckpt {name} " if name else "ckpt "
    kept = [(key, value) for key, value in item.user_properties if not key.startswith(prefix)]
    item.user_properties[:] = kept + [
        (f"{prefix}{verdict.metric} {key}", str(value))
        for verdict in record.verdicts
        for key, value in (("outcome", verdict.outcome), ("change", verdict.change), ("verdict", verdict.text))
        if value is not None
    ]
    lines = [line for verdict in record.verdicts for line in section_lines(verdict)]
    if lines:
        item.add_report_section("call", f"ckpt verdict{f' {name}' if name else ''}", "\n".join(lines))
    noted = item.stash.setdefault(_FAILURES, [])
    told = [f"{name}: {failure}" if name else failure for failure in failures]
    noted += [failure for failure in told if failure not in noted]


def section_lines(verdict: Verdict) -> list[str]:
    """Return a verdict with all its figures, a line each."""
    lines = [verdict.text]
    if verdict.now is None or verdict.baseline is None or verdict.change is None:
        return lines
    show = _SHOW[verdict.metric]
    low, high = verdict.interval or (None, None)
    bounded = f"{100 * low:+.1f} % to {100 * high:+.1f} %" if low is not None and high is not None else "not bounded"
    lines += [
        f"  now          {show(verdict.now)}",
        f"  baseline     {show(verdict.baseline)}, median of {verdict.sessions} sessions on {verdict.hosts} hosts",
        f"  change       {100 * verdict.change:+.1f} %",
        f"  interval     {bounded}, each bound at {100 * (verdict.confidence or 0):.4g} %, look {verdict.looks}",
    ]
    if verdict.tolerance is not None:
        lines.append(f"  tolerance    {100 * verdict.tolerance:g} % of throughput")
    if verdict.detectable is not None:
        lines.append(f"  detectable   {100 * verdict.detectable:+.1f} %")
    if verdict.attribution:
        lines.append(f"  attribution  {verdict.attribution}")
    return [*lines, f"  source       {verdict.source}"]


class ItemVerdicts:
    """Registered as a plugin beside the `Run`."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Fail a test that passed, where its scenarios did not."""
        result = yield
        failures = item.stash.get(_FAILURES, [])
        if failures:
            raise pytest.fail.Exception("\n".join(failures), pytrace=False)
        return result
