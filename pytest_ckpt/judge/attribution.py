"""Why a scenario became slower: the machine, seen by the session's own probes, or the software, seen by its phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from pytest_ckpt.judge.comparable import changed_surroundings
from pytest_ckpt.judge.findings import is_synced, phase_medians
from pytest_ckpt.records import BOUND_TERMS, Bounds, SaveRecord
from pytest_ckpt.units import format_rate, format_seconds

_MOST_OF_IT = 0.5
_PART_OF_IT = 0.2
_BLOCKING_PHASES = ("state_dict", "stage", "copy", "other")
"""What training waits for in an async save; planning and writing come afterwards."""
_TERM_PHASES = {
    "storage": ("write", "sync", "other"),
    "cache": ("write",),
    "copy": ("copy", "stage"),
    "serialize": ("serialize",),
}
"""Where the seconds of a bound are spent; those of a writer that cannot be watched are `other`."""
_TERM_NAMES = {
    "storage": "storage",
    "cache": "page cache",
    "copy": "memory copies",
    "serialize": "CPU (serialising)",
}
_RATES: dict[str, Callable[[SaveRecord], float | None]] = {
    "storage": lambda record: record.probes.storage_Bps(is_synced(record)) if record.probes else None,
    "cache": lambda record: record.probes.write_buffered_Bps if record.probes else None,
    "copy": lambda record: record.probes.copy_Bps if record.probes else None,
    "serialize": lambda record: record.probes.serialize_Bps if record.probes else None,
}


def attribute(metric: str, now: SaveRecord, stored: Sequence[SaveRecord]) -> str:
    """Return what became slower since `stored`, in half a sentence that begins with `storage`, `machine` or `software`.

    The probes of both sides say how many seconds the machine alone would add to a save; where that is most of what
    was added, it is the machine. Else it is the software: the phase that grew most is named, and what else changed.
    """
    grown_s = _seconds(metric, now) - median(_seconds(metric, record) for record in stored)
    phase = _grown_phase(metric, now, stored)
    changed = _changed(now, stored)
    terms = _grown_terms(metric, now, stored)
    if terms is not None:
        terms = _capped(terms, now, stored)
    if terms is None or grown_s <= 0:
        return f"not told apart, since there are no probes on both sides; {phase}{changed}"
    share = sum(terms.values()) / grown_s
    worst = max(terms, key=lambda term: terms[term])
    if share >= _MOST_OF_IT:
        who = "storage slower" if worst == "storage" else f"machine slower, {_TERM_NAMES[worst]}"
        return f"{who}: {_rates(worst, now, stored)}; {phase}{changed}"
    if share >= _PART_OF_IT:
        return (
            f"software slower, and part of it the {_TERM_NAMES[worst]}: {_rates(worst, now, stored)}; {phase}{changed}"
        )
    held = _rates("storage", now, stored) if metric != "stall" else _rates("copy", now, stored)
    return f"software slower: the probe held ({held}); {phase}{changed}"


def _seconds(metric: str, record: SaveRecord) -> float:
    return record.stall_s if metric == "stall" else record.save_s


def _grown_terms(metric: str, now: SaveRecord, stored: Sequence[SaveRecord]) -> dict[str, float] | None:
    """Return the seconds that each bound has grown by; None where a side has none."""
    before = [record.bounds for record in stored if record.bounds is not None]
    if now.bounds is None or not before:
        return None
    names = ("copy",) if metric == "stall" else BOUND_TERMS
    return {name: _term(now.bounds, name) - median(_term(bounds, name) for bounds in before) for name in names}


def _capped(terms: dict[str, float], now: SaveRecord, stored: Sequence[SaveRecord]) -> dict[str, float]:
    """Return each bound's growth, as far as the phases that it bounds have grown: probes have noise of their own."""
    own, before = phase_medians(now), [phase_medians(record) for record in stored]
    if not any(own.values()) or not all(any(phases.values()) for phases in before):
        return terms

    def grown(term: str) -> float:
        names = _TERM_PHASES[term]
        return sum(own.get(n, 0.0) for n in names) - median(sum(p.get(n, 0.0) for n in names) for p in before)

    return {term: min(added, max(0.0, grown(term))) for term, added in terms.items()}


def _term(bounds: Bounds, name: str) -> float:
    return float(getattr(bounds, f"{name}_s") or 0.0)


def _rates(term: str, now: SaveRecord, stored: Sequence[SaveRecord]) -> str:
    own = _RATES[term](now)
    before = [rate for record in stored if (rate := _RATES[term](record))]
    if not own or not before:
        return "rate not known"
    return f"{format_rate(own)} by its probe, {format_rate(median(before))} before"


def _grown_phase(metric: str, now: SaveRecord, stored: Sequence[SaveRecord]) -> str:
    own, before = phase_medians(now), [phase_medians(record) for record in stored]
    grown = {
        name: own.get(name, 0.0) - median(phases.get(name, 0.0) for phases in before)
        for name in dict.fromkeys([*own, *(name for phases in before for name in phases)])
        if metric != "stall" or name in _BLOCKING_PHASES
    }
    worst = max(grown, key=lambda name: grown[name], default=None)
    if worst is None or grown[worst] <= 0:
        return "no phase grew"
    was_s = own.get(worst, 0.0) - grown[worst]
    return f"phase {worst} grew most, from {format_seconds(was_s)} to {format_seconds(own[worst])}"


def _changed(now: SaveRecord, stored: Sequence[SaveRecord]) -> str:
    changed = changed_surroundings(now, stored[-1])
    return (
        f"; changed since the baseline: {', '.join(changed)}"
        if changed
        else "; no recorded version or fact of the hardware changed"
    )
