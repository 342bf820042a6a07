"""Ok, improved, regressed or undecided: a scenario's rounds against those of its baseline.

The rule: the shift of log(seconds) between now and the pooled sessions, with exact one-sided bounds. *Regressed* where
its lower bound exceeds the margin, *improved* where its upper bound lies as far on the other side, *ok* where the upper
bound lies under the margin, else *undecided*: these samples cannot tell. One further look is allowed. Of all
comparisons of a run, made at both looks, 5 % at most may be a false alarm (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import msgspec

from pytest_ckpt.judge.attribution import attribute
from pytest_ckpt.judge.baseline import WANTED_SESSIONS, Session, anchor, recent
from pytest_ckpt.judge.comparable import comparable_sessions, incomparable
from pytest_ckpt.judge.metrics import METRICS, Metric
from pytest_ckpt.judge.shift import Shift, sessions_needed, shift
from pytest_ckpt.records import SaveRecord, Verdict
from pytest_ckpt.units import count, format_seconds

LEAST_ROUNDS = 4
FALSE_ALARMS = 0.05
LOOKS = 2
_WANTED_HOSTS = 3
_LEAST_SESSIONS = 3
"""Of a metric that is measured once a session."""
_STALE = 3.0


@dataclass(frozen=True)
class Rule:
    """How large a change must be, and how sure."""

    tolerance: float = 0.10
    """The share of throughput that may be lost."""
    comparisons: int = 1
    """How many comparisons the stored baseline gives a whole run."""
    host: str | None = None
    """Hash of this host's name, to be found among those of the baseline."""

    @property
    def margin(self) -> float:
        """The shift of log(seconds) that is tolerated."""
        return -math.log(1 - self.tolerance)

    @property
    def error(self) -> float:
        """How often one bound of one look may be wrong."""
        return FALSE_ALARMS / LOOKS / max(1, self.comparisons)


def judge(record: SaveRecord, sessions: Sequence[Session], rule: Rule, looks: int = 1) -> list[Verdict]:
    """Return a verdict for each metric of `record` that is judged; `sessions` are its baseline, oldest first."""
    metrics = [metric for metric in METRICS if metric.applies(record.scenario.mode)]
    if not sessions:
        return [_unjudged(metrics[0], "no baseline", "no baseline of this scenario on this hardware")]
    comparable = comparable_sessions(record, sessions)
    if not comparable:
        reasons = (incomparable(record, other) for other in sessions[-1].records)
        return [_unjudged(metrics[0], "not comparable", next(reason for reason in reasons if reason))]
    pools = _pools(comparable)
    verdicts = []
    for metric in metrics:
        judged = [_Comparison(metric, record, pool, rule, looks, pool is not pools[0]).verdict() for pool in pools]
        known = [verdict for verdict in judged if verdict is not None]
        if known:
            # The anchor is there for creep alone: what it cannot tell leaves the recent sessions' verdict as it is.
            verdicts.append(next((v for v in known if v.outcome == "regressed"), known[0]))
    return verdicts


def decide(found: Shift, margin: float) -> str:
    """Return the outcome for a shift of log(seconds) and the margin that it may have."""
    if found.low > margin:
        return "regressed"
    if found.high < -margin:
        return "improved"
    return "ok" if found.high < margin else "undecided"


def comparisons_of(mode: str, sessions: Sequence[Session]) -> int:
    """Return how many comparisons the stored `sessions` of one scenario give a run."""
    records = [record for session in sessions for record in session.records]
    metrics = [metric for metric in METRICS if metric.applies(mode) and metric.costs(records)]
    return len(metrics) * len(_pools(list(sessions))) if sessions else 0


def wants_second_look(record: SaveRecord, verdicts: Sequence[Verdict]) -> bool:
    """Return whether more rounds could decide what is undecided, and are still allowed."""
    return (
        len(record.rounds) >= LEAST_ROUNDS
        and all(verdict.looks < LOOKS for verdict in verdicts)
        and is_undecided(verdicts)
    )


def is_undecided(verdicts: Sequence[Verdict]) -> bool:
    """Return whether throughput or stall could not be told."""
    return bool(undecided(verdicts))


def undecided(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts on throughput and stall that could not tell.

    Efficiency does not count: it has one probe a session, and where it alone is not sure nothing is slower.
    """
    return [v for v in verdicts if v.outcome == "undecided" and v.metric != "efficiency"]


def _pools(sessions: list[Session]) -> list[list[Session]]:
    return [recent(sessions)] + ([anchor(sessions)] if len(sessions) > WANTED_SESSIONS else [])


def _unjudged(metric: Metric, outcome: str, reason: str) -> Verdict:
    return Verdict(metric=metric.name, outcome=outcome, text=f"{metric.name} {outcome}: {reason}")


class _Comparison:
    """One metric of a record against one pool of sessions."""

    def __init__(
        self, metric: Metric, record: SaveRecord, pool: list[Session], rule: Rule, looks: int, is_anchor: bool
    ) -> None:
        self.metric, self.record, self.pool, self.rule, self.looks = metric, record, pool, rule, looks
        self.is_anchor = is_anchor
        self.now = metric.costs([record])
        self.by_session = [metric.costs(session.records) for session in pool]
        self.base = [cost for costs in self.by_session for cost in costs]

    def verdict(self) -> Verdict | None:
        """Return the verdict; None where a side does not know the metric."""
        if not self.now or not all(self.by_session):
            return None
        found = self.found
        outcome = self._outcome()
        now, baseline = self._value(self.now), self._value(self.base)
        interval = sorted([self.metric.change(found.low), self.metric.change(found.high)])
        attribution = None
        if outcome == "regressed":
            attribution = attribute(self.metric.name, self.record, [r for s in self.pool for r in s.records])
        verdict = Verdict(
            metric=self.metric.name,
            outcome=outcome,
            now=now,
            baseline=baseline,
            change=self.metric.change(found.middle),
            # Of throughput -100 % is no bound, of a stall infinity is none.
            interval=[bound if math.isfinite(found.low) else None for bound in interval],
            detectable=self._detectable(),
            attribution=attribution,
            source=", ".join(session.source for session in self.pool),
            tolerance=self.rule.tolerance,
            confidence=1 - self.rule.error,
            comparisons=self.rule.comparisons,
            sessions=len(self.pool),
            hosts=len({session.host for session in self.pool}),
            looks=self.looks,
        )
        return msgspec.structs.replace(verdict, text=self._sentence(verdict))

    @cached_property
    def found(self) -> Shift:
        """By how much the logarithm of the cost has grown."""
        return shift(self.base, self.now, self.rule.error)

    def _outcome(self) -> str:
        if self._too_few():
            return "undecided"
        outcome = decide(self.found, self.margin)
        if outcome == "ok" and self.found.high >= self.rule.margin:
            return "undecided"  # within what sessions differ, which is more than is tolerated
        return "ok" if outcome == "regressed" and self._is_nothing() else outcome

    def _is_nothing(self) -> bool:
        """Return whether the change, however sure, is so small in seconds that no one notices."""
        return self.metric.least_change > 0 and (
            math.exp(median(self.base)) * math.expm1(min(self.found.middle, 1.0)) < self.metric.least_change
        )

    def _too_few(self) -> bool:
        sessions = _LEAST_SESSIONS if self.metric.once_a_session else 1
        return len(self.now) < LEAST_ROUNDS or len(self.pool) < sessions

    @cached_property
    def margin(self) -> float:
        """The shift that is tolerated: of what is measured once a session, no less than sessions differ.

        Rounds of one session share its probe, so that they agree with each other and not with another session's.
        """
        if not self.metric.once_a_session or len(self.pool) < 2:
            return self.rule.margin
        middles = [median(costs) for costs in self.by_session]
        spread = max(middles) - min(middles)
        return max(self.rule.margin, max(middles) - median(self.base) + max(spread, self.rule.margin))

    def _detectable(self) -> float | None:
        if not math.isfinite(self.found.low) or self._too_few():
            return None
        return self.metric.change(self.margin + self.found.middle - self.found.low)

    def _value(self, costs: list[float]) -> float:
        return self.metric.value(self.record, math.exp(median(costs)))

    def _sentence(self, verdict: Verdict) -> str:
        show = self.metric.show
        assert verdict.now is not None
        assert verdict.baseline is not None
        assert verdict.change is not None
        parts = [
            f"{verdict.metric} {verdict.outcome}: {show(verdict.now)}, baseline {show(verdict.baseline)}: "
            f"{_percent(verdict.change)}{self._bounds(verdict)}"
        ]
        if self.is_anchor:
            parts.append("little by little, since this is against the first sessions and not against the last")
        if verdict.attribution:
            parts.append(verdict.attribution)
        if verdict.outcome == "improved" and not self.metric.once_a_session:
            stale = verdict.change > _STALE - 1 or verdict.change < 1 / _STALE - 1
            parts.append(
                ("the baseline is stale by a factor of three or more: " if stale else "the baseline is stale: ")
                + "--ckpt-baseline=save adds this session"
            )
        if verdict.outcome == "ok" and decide(self.found, self.margin) != "ok":
            parts.append(f"less than {format_seconds(self.metric.least_change)} more, which no one notices")
        elif verdict.outcome in ("ok", "undecided"):
            parts.append(self._power(verdict))
        parts.append(self._standing(verdict))
        return "; ".join(part for part in parts if part)

    def _bounds(self, verdict: Verdict) -> str:
        low, high = verdict.interval or (None, None)
        if low is None or high is None:
            return ""
        return f" ({_percent(low)} to {_percent(high)})"

    def _power(self, verdict: Verdict) -> str:
        if len(self.now) < LEAST_ROUNDS:
            return f"{len(self.now)} rounds, and fewer than {LEAST_ROUNDS} are not judged"
        if self._too_few():
            return f"one probe a session, so that {_LEAST_SESSIONS} sessions are needed"
        if self.margin > self.rule.margin:
            return f"the probes of its sessions differ, and {_percent(verdict.detectable or 0)} could have been shown"
        if verdict.detectable is not None:
            return f"{_percent(verdict.detectable)} could have been shown"
        rounds = max(1, len(self.base) // len(self.pool))
        needed = sessions_needed(len(self.now), rounds, self.rule.error)
        return (
            f"{len(self.now)} rounds against {len(self.base)} can show nothing in {self.rule.comparisons} comparisons"
            + (f", {needed} sessions of {rounds} rounds would" if needed else "")
        )

    def _standing(self, verdict: Verdict) -> str:
        """Return on what the baseline stands."""
        words = [count(len(self.pool), "session")]
        if len(self.pool) == 1:
            words.append("how sessions differ is not known")
        hosts = {session.host for session in self.pool}
        if self.rule.host is not None and self.rule.host not in hosts:
            words.append(f"measured on {count(len(hosts), 'other host')}")
        elif len(hosts) > 1:
            words.append(f"on {count(len(hosts), 'host')}")
        is_fleet = len(hosts) > 1 or (self.rule.host is not None and self.rule.host not in hosts)
        if is_fleet and len(hosts) < _WANTED_HOSTS:
            words.append(f"fewer than {_WANTED_HOSTS}, so how hosts differ is not known")
        return f"baseline of {', '.join(words)}"


def _percent(change: float) -> str:
    return f"{100 * change:+.0f} %" if abs(change) >= 0.095 or change == 0 else f"{100 * change:+.1f} %"
