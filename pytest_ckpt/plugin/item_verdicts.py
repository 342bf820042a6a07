"""The verdict on the test item: it fails the test that ran the scenario, so that JUnit and exit status agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from pytest_ckpt.judge.metrics import METRICS
from pytest_ckpt.records import SaveRecord, Verdict
from pytest_ckpt.units import count

_FAILURES: pytest.StashKey[list[str]] = pytest.StashKey()
_TOLD: pytest.StashKey[int] = pytest.StashKey()
"""How many of them a report of the test has told."""
_SHOW = {metric.name: metric.show for metric in METRICS}


def note_verdicts(item: pytest.Item, name: str | None, record: SaveRecord, failures: Sequence[str]) -> None:
    """Put the verdicts on `item`: properties for JUnit, a section for its report, and `failures` for its outcome.

    What failed stays failed when the item is run again: a test that is repeated until it is green judges nothing.
    """
    noted = item.stash.setdefault(_FAILURES, [])
    told = [f"{name}: {failure}" if name else failure for failure in failures]
    noted += [failure for failure in told if failure not in noted]
    prefix = f"ckpt {name} " if name else "ckpt "
    if any(key == f"{prefix}failed" for key, _ in item.user_properties):
        return  # the properties are those of the try that failed, as the failure is
    kept = [(key, value) for key, value in item.user_properties if not key.startswith(prefix)]
    item.user_properties[:] = kept + [
        (f"{prefix}{verdict.metric} {key}", str(value))
        for verdict in record.verdicts
        for key, value in (("outcome", verdict.outcome), ("change", verdict.change), ("verdict", verdict.text))
        if value is not None
    ]
    if failures:
        item.user_properties.append((f"{prefix}failed", "yes"))
    lines = [line for verdict in record.verdicts for line in section_lines(verdict)]
    if lines:
        item.add_report_section("call", f"ckpt verdict{f' {name}' if name else ''}", "\n".join(lines))


def section_lines(verdict: Verdict) -> list[str]:
    """Return a verdict with all its figures, a line each."""
    lines = [verdict.text]
    if verdict.now is None or verdict.baseline is None or verdict.change is None:
        return lines
    show = _SHOW[verdict.metric]
    low, high = verdict.interval or (None, None)
    bounded = f"{100 * low:+.1f} % to {100 * high:+.1f} %" if low is not None and high is not None else "not bounded"
    stands_on = f"{count(verdict.sessions, 'session')} on {count(verdict.hosts, 'host')}"
    lines += [
        f"  now          {show(verdict.now)}",
        f"  baseline     {show(verdict.baseline)}, median of {stands_on}",
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
        """Fail a test that passed or skipped itself, where its scenarios did not pass."""
        try:
            result = yield
        except pytest.skip.Exception:
            _raise_untold(item, again=True)
            raise
        except BaseException:  # the test's own failure is what is reported, with the verdicts in a section
            item.stash[_TOLD] = len(item.stash.get(_FAILURES, []))
            raise
        _raise_untold(item, again=True)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """Fail a test whose fixtures saved after it had ended."""
        result = yield
        _raise_untold(item)
        return result


def _raise_untold(item: pytest.Item, again: bool = False) -> None:
    """Fail with what has not been told; `again`: with all, as each try of a test must."""
    failures = item.stash.get(_FAILURES, [])
    told = 0 if again else item.stash.get(_TOLD, 0)
    item.stash[_TOLD] = len(failures)
    if failures[told:]:
        raise pytest.fail.Exception("\n".join(failures[told:]), pytrace=False)
