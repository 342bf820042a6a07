"""The session's baselines: what is stored for its targets, what its saves are judged against, what is added."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_ckpt.errors import SettingError
from pytest_ckpt.judge.absence import explain_absence
from pytest_ckpt.judge.baseline import WANTED_SESSIONS
from pytest_ckpt.judge.comparable import comparable_sessions
from pytest_ckpt.judge.scenarios import full_key
from pytest_ckpt.judge.store import Store, Stored
from pytest_ckpt.judge.verdict import (
    LEAST_ROUNDS,
    Rule,
    comparisons_of,
    is_undecided,
    judge,
    undecided,
    wants_second_look,
)
from pytest_ckpt.measure.hardware import look_at_hardware
from pytest_ckpt.measure.hardware_id import hardware_id, id_rule
from pytest_ckpt.plugin import benchmark
from pytest_ckpt.plugin.settings import Settings, of_label
from pytest_ckpt.plugin.undecided import UndecidedRuns
from pytest_ckpt.records import Hardware, SaveRecord
from pytest_ckpt.target.interface import Target
from pytest_ckpt.target.volume import VolumeIdentity
from pytest_ckpt.units import count


@dataclass(frozen=True)
class _Place:
    """A target of the session, and what is stored for its hardware."""

    target: Target
    hardware_id: str
    rule: str
    """What the id was made of, in words."""
    stored: Stored
    confirmed: bool
    """Whether the user named this id as the one to expect: another id is then none that is missing."""
    used: bool
    """Whether a selected test saves there."""


@dataclass
class Baselines:
    """Of one session. Everything stored is read once, before the first save: what this run adds judges nothing."""

    config: pytest.Config
    settings: Settings
    store: Store = field(init=False)
    lines: list[str] = field(default_factory=list)
    """What the summary must say: nothing of it may be missed."""
    saved: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """What could not be saved, although that was asked for."""

    def __post_init__(self) -> None:
        self.store = Store(self.settings.baseline_folder)
        self._places: dict[str, _Place] = {}
        self._hardware: Hardware | None = None
        self._notes: list[str] = []
        self._keep: dict[str, list[SaveRecord]] = {}
        self._undecided = UndecidedRuns(self.config)

    @property
    def mode(self) -> str:
        """`check`, `grow`, `save`, `require` or `off`, as always where benchmarks are disabled."""
        return "off" if benchmark.is_disabled(self.config) else self.settings.baseline

    @property
    def hardware(self) -> Hardware:
        """This machine's; looked at once."""
        if self._hardware is None:
            self._hardware, self._notes = look_at_hardware()
        return self._hardware

    def open(self, target: Target, volume: VolumeIdentity, used: bool = True) -> None:
        """Find what is stored for `target`; `SettingError` where it is not what was expected, or cannot be used.

        One that no selected test uses still counts among the comparisons: they do not depend on the selection.
        """
        if target.label in self._places:
            return
        storage = (volume.storage_class, volume.filesystem, volume.medium)
        given = of_label(self.settings.hardware, target.label)
        name = given or hardware_id(self.hardware, *storage)
        rule = "--ckpt-hardware" if given else "; ".join(facts for _, facts in id_rule(self.hardware, *storage))
        expected = of_label(self.settings.expected_hardware, target.label)
        if expected is not None and expected != name:
            raise SettingError(
                f"target {target.label} ({target.location}) has hardware id {name}, and --ckpt-expect-hardware names "
                f"{expected}: it is made of {rule}; mount the right volume, run on the right machine, or write "
                f"{target.label}={name}"
            )
        stored = Stored(name, [], []) if self.mode == "off" else self.store.read(name)
        for damaged in stored.damaged:
            problem = f"baseline {self.store.folder / name / damaged.file} is not used: {damaged.problem}"
            if self.mode in ("require", "grow"):
                raise SettingError(f"{problem}; restore it, or remove it on purpose (--ckpt-baseline={self.mode})")
            self.lines.append(problem)
        self._places[target.label] = _Place(target, name, rule, stored, expected is not None, used)
        if self.mode == "save" or (self.mode == "grow" and self._grows(stored)):
            self._require_writable(self.store.folder / name)

    def check_labels(self) -> None:
        """Raise `SettingError` where an id was given for a target that this session has not."""
        known = {*self._places, *([spec.label for spec in self.settings.targets] or ["local"]), None}
        for option, ids in (
            ("--ckpt-hardware", self.settings.hardware),
            ("--ckpt-expect-hardware", self.settings.expected_hardware),
        ):
            for label, name in ids.items():
                if label not in known:
                    labels = ", ".join(str(known_label) for known_label in known if known_label)
                    raise SettingError(f"{label}={name} (from {option}) names no target; the targets are: {labels}")

    def id_of(self, target: Target) -> str:
        """Return the hardware id of `target`, which was opened."""
        return self._places[target.label].hardware_id

    def header_lines(self) -> list[str]:
        """Return what is stored for each target, and how sure a verdict will be."""
        default = " (default)" if "baseline" in self.settings.reasons else ""
        lines = [f"ckpt: hardware: {note}" for note in self._notes]
        for place in (place for place in self._places.values() if place.used):
            line = f"ckpt: hardware id of {place.target.label}: {place.hardware_id}"
            if self.mode == "off":
                lines.append(f"{line}; baselines off: nothing is judged")
                continue
            scenarios = place.stored.scenarios()
            runs = {s.session for scenario in scenarios for s in place.stored.sessions(scenario)}
            hosts = {s.host for scenario in scenarios for s in place.stored.sessions(scenario)}
            if runs:
                has = f"{count(len(runs), 'session')} of {count(len(scenarios), 'scenario')}"
                has += f" on {count(len(hosts), 'host')}"
            elif place.stored.entries:
                has = "examples alone, which judge nobody"
            else:
                has = "none"
            lines.append(f"{line}; baseline: {has} in {self.store.folder}; {self.mode}{default}")
        if any(self._places) and self.comparisons:
            error = Rule(comparisons=self.comparisons).error
            lines.append(
                f"ckpt: verdicts: tolerance {100 * self.settings.tolerance:g} % of throughput"
                f"{' (default)' if 'tolerance' in self.settings.reasons else ''}; "
                f"{count(self.comparisons, 'comparison')} a run, so that each bound holds at {100 * (1 - error):.4g} %"
            )
        return lines + [f"ckpt: warning: {line}" for line in self.lines]

    @property
    def comparisons(self) -> int:
        """How many comparisons the stored baselines of all targets give a run, whatever is selected of it."""
        return sum(
            comparisons_of(scenario.mode, place.stored.sessions(scenario))
            for place in self._places.values()
            for scenario in place.stored.scenarios()
        )

    def judged(self, record: SaveRecord, target: Target, tolerance: float, looks: int = 1) -> SaveRecord:
        """Return `record` with its verdicts."""
        if self.mode == "off":
            return record
        place = self._places[target.label]
        rule = Rule(tolerance=tolerance, comparisons=self.comparisons, host=self._host(record))
        sessions = place.stored.sessions(record.scenario)
        verdicts = judge(record, sessions, rule, looks)
        if not sessions:
            absence = explain_absence(self.store, place.stored, record, self._is_here(place))
            verdicts = [msgspec.structs.replace(verdicts[0], text=absence.text)]
        return msgspec.structs.replace(record, verdicts=verdicts)

    def wants_second_look(self, record: SaveRecord, target: Target) -> bool:
        """Return whether more rounds in a fresh world could decide what is undecided; what grows decides nothing."""
        return wants_second_look(record, record.verdicts) and not self._is_growing(record, self._places[target.label])

    def conclude(self, record: SaveRecord, target: Target) -> tuple[SaveRecord, list[str]]:
        """Return the record with its last words, and why its test must fail, a sentence each.

        What is to be saved of the session is noted, and written when the session ends.
        """
        if self.mode == "off":
            return record, []
        place = self._places[target.label]
        growing = self._is_growing(record, place)
        key = f"{place.hardware_id} {full_key(record.scenario)}"
        times = self._undecided.note(key, is_undecided(record.verdicts) and not growing)
        if times >= UndecidedRuns.SAID:
            said = f"undecided in {times} runs in a row: more rounds (--ckpt-rounds) or more sessions would tell"
            record = _with_words(record, "undecided", said)
        sessions = comparable_sessions(record, place.stored.sessions(record.scenario))
        failures = self._failures(record, place, growing, bool(sessions))
        regressed = [v.text for v in record.verdicts if v.outcome == "regressed"]
        if growing and regressed:
            said = f"not failed, since the baseline still grows ({len(sessions)} of {WANTED_SESSIONS} sessions)"
            record = _with_words(record, "regressed", said)
        if len(record.rounds) < LEAST_ROUNDS:
            if growing or self.mode == "save":
                self.lines.append(
                    f"not saved as baseline: {len(record.rounds)} rounds of {record.scenario.mode}, and {LEAST_ROUNDS} "
                    "are the least"
                )
        elif (growing and not failures) or (self.mode == "save" and (not regressed or self.settings.baseline_force)):
            self._keep.setdefault(target.label, []).append(record)
        elif self.mode == "save":
            self.lines.append(
                f"not saved as baseline, since it regressed: {record.target.label} {record.scenario.mode}; "
                "--ckpt-baseline-force saves it all the same, and `pytest-ckpt baseline replace` makes it the new "
                "baseline"
            )
        return record, failures

    def save(self, document: dict[str, Any]) -> None:
        """Add what was to be kept of this run, whose result file `document` is: one file a target."""
        for label, records in self._keep.items():
            place = self._places[label]
            # Not by scenario: of two tests of one scenario only one may be fit to be kept.
            times = {record.time for record in records}
            rows = [row for row in document["benchmarks"] if row["extra_info"]["ckpt"]["time"] in times]
            if not rows:  # a test that was run again, and was not fit to be kept then
                continue
            try:
                path = self.store.add({**document, "benchmarks": rows}, place.hardware_id, label=label)
            except SettingError as error:
                self.failed.append(f"no baseline was saved for {label}: {error}")
                continue
            after = self.store.read(place.hardware_id)
            counts = {len(after.sessions(record.scenario)) for record in records}
            wanted = f" of {WANTED_SESSIONS}" if min(counts) < WANTED_SESSIONS else ""
            self.saved.append(f"baseline saved: {path} (session {min(counts)}{wanted})")
        self._keep.clear()

    def _is_growing(self, record: SaveRecord, place: _Place) -> bool:
        sessions = comparable_sessions(record, place.stored.sessions(record.scenario))
        return self.mode == "grow" and len(sessions) < WANTED_SESSIONS

    def _failures(self, record: SaveRecord, place: _Place, growing: bool, has_baseline: bool) -> list[str]:
        verdicts = record.verdicts
        failures = []
        if not has_baseline:
            text = verdicts[0].text
            absence = explain_absence(self.store, place.stored, record, self._is_here(place))
            if self.mode == "require":
                failures.append(f"{text} (--ckpt-baseline=require)")
            elif absence.suspicious and self.mode == "grow":
                failures.append(
                    f"{text}; if this is as it should be, save once with --ckpt-baseline=save, or name it with "
                    f"--ckpt-expect-hardware={place.target.label}={place.hardware_id}"
                )
            elif absence.has_nearest or verdicts[0].outcome == "not comparable":
                self.lines.append(f"{record.target.label} {record.scenario.mode}: {text}")
        forced = self.mode == "save" and self.settings.baseline_force
        if not growing and not forced:
            failures += [verdict.text for verdict in verdicts if verdict.outcome == "regressed"]
            if "undecided" in self.settings.fail_on:
                failures += [f"{verdict.text} (--ckpt-fail-on=undecided)" for verdict in undecided(verdicts)]
        return failures

    def _is_here(self, place: _Place) -> Callable[[str, int], bool]:
        """Return the test of whether a stored scenario can be explained by what this session has beside it."""
        here = {other.hardware_id for other in self._places.values()}
        sizes = set(self.settings.ranks)

        def is_here(hardware_id: str, world_size: int) -> bool:
            if hardware_id == place.hardware_id:
                return world_size in sizes
            return hardware_id in here or place.confirmed

        return is_here

    def _host(self, record: SaveRecord) -> str | None:
        if not self.comparisons or not self.store.has_salt:  # asking would make it, and a check writes nothing
            return None
        try:
            return self.store.host_hash(record.host)
        except SettingError as error:
            if str(error) not in self.lines:
                self.lines.append(str(error))
            return None

    def _grows(self, stored: Stored) -> bool:
        """Return whether a run may have to add to it."""
        scenarios = stored.scenarios()
        return not scenarios or any(len(stored.sessions(scenario)) < WANTED_SESSIONS for scenario in scenarios)

    def _require_writable(self, folder: Path) -> None:
        there = folder
        while not there.exists() and there != there.parent:
            there = there.parent
        if not os.access(there, os.W_OK | os.X_OK) or not there.is_dir():
            raise SettingError(
                f"baselines cannot be saved in {folder}: {there} cannot be written; give another --ckpt-baseline-dir, "
                "or --ckpt-baseline=check and `pytest-ckpt baseline add` where it can be"
            )


def _with_words(record: SaveRecord, outcome: str, words: str) -> SaveRecord:
    """Return the record with `words` after the first verdict that is `outcome`."""
    verdicts = list(record.verdicts)
    place = next((number for number, verdict in enumerate(verdicts) if verdict.outcome == outcome), None)
    if place is not None:
        verdicts[place] = msgspec.structs.replace(verdicts[place], text=f"{verdicts[place].text}; {words}")
    return msgspec.structs.replace(record, verdicts=verdicts)
