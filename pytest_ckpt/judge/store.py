"""The folder of baselines: a folder for each hardware id, and in it a numbered file for each run and target."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

import pytest_ckpt
from pytest_ckpt.errors import SettingError
from pytest_ckpt.judge.baseline import Session
from pytest_ckpt.judge.baseline_document import baseline_document
from pytest_ckpt.judge.baseline_file import Damaged, Entry, Head, parse_entry, read_entry, render
from pytest_ckpt.judge.host_hash import SALT, hash_host
from pytest_ckpt.judge.new_file import only_one, write_new
from pytest_ckpt.judge.result_rows import Row, UnusableRows, rows_of
from pytest_ckpt.judge.scenarios import Difference, canonical, differences, full_key
from pytest_ckpt.records import Hardware, Scenario, TargetRecord

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")
_NUMBERED = re.compile(r"(\d{4})_")
_LARGEST_NUMBER = 9999
_LOCK_S = 30.0
_FREE_FIELDS = {"world_size", "mesh"}
"""Where only these differ, a scenario may be held at another size of the world: a GPU may be gone."""


class Stored(msgspec.Struct, frozen=True):
    """All files of one hardware id, oldest first."""

    hardware_id: str
    entries: list[Entry]
    damaged: list[Damaged]
    """What lies there too and is not judged against."""

    def scenarios(self, *, examples: bool = False) -> list[Scenario]:
        """Return the scenarios that sessions are held of; with `examples` also those that only examples show."""
        found: dict[str, Scenario] = {}
        for entry in self.entries:
            if examples or not entry.head.example:
                for record in entry.records:
                    found.setdefault(full_key(record.scenario), record.scenario)
        return list(found.values())

    def sessions(self, scenario: Scenario) -> list[Session]:
        """Return the sessions to judge `scenario` against, oldest first: since it was last replaced, no examples."""
        return [_session(run, scenario) for run in runs(self.current(scenario))]

    def current(self, scenario: Scenario) -> list[Entry]:
        """Return the files of those sessions."""
        held = [entry for entry in self.entries if not entry.head.example and entry.holding(scenario)]
        replaced = max((place for place, entry in enumerate(held) if entry.head.replaces), default=0)
        # A run that replaces may have more than one file: one for each of its equal drives.
        return [
            entry
            for place, entry in enumerate(held)
            if place >= replaced or (entry.head.replaces and entry.session == held[replaced].session)
        ]

    def has_only_examples(self, scenario: Scenario) -> bool:
        """Return whether examples hold `scenario`, and nothing else does."""
        holding = [entry.head.example for entry in self.entries if entry.holding(scenario)]
        return bool(holding) and all(holding)


class Holder(msgspec.Struct, frozen=True):
    """A stored scenario, where it is held, and in what it differs from the one that was asked for."""

    hardware_id: str
    scenario: Scenario
    hardware: Hardware | None
    target: TargetRecord
    differs: list[Difference]
    """Fields of the scenario; empty: the very same, under another id."""


class Store:
    """The baselines in `folder`, which need not exist before something is added."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[tuple[Any, ...], Entry | Damaged] = {}

    def ids(self) -> list[str]:
        """Return the hardware ids that have files here."""
        try:
            return sorted(
                entry.name
                for entry in self.folder.iterdir()
                if entry.is_dir() and not entry.name.startswith(".") and _json_names(entry)
            )
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SettingError(f"the baselines in {self.folder} cannot be read: {error.strerror}") from None

    def read(self, hardware_id: str) -> Stored:
        """Return what is stored under `hardware_id`, which may be nothing."""
        if "/" in hardware_id or hardware_id in ("", ".", ".."):
            raise SettingError(f"{hardware_id!r} cannot be a hardware id")
        folder = self.folder / hardware_id
        found: list[Entry | Damaged] = []
        try:
            found = [_printable(self._entry(folder / name, hardware_id)) for name in _json_names(folder)]
        except FileNotFoundError:
            pass
        except OSError as error:
            found = [Damaged(".", f"it cannot be read: {error.strerror}")]
        entries = [one for one in found if isinstance(one, Entry)]
        entries.sort(key=lambda entry: (entry.number, entry.head.saved, entry.file))
        return Stored(hardware_id, entries, [one for one in found if isinstance(one, Damaged)])

    def holders(self, scenario: Scenario, hardware_id: str) -> list[Holder]:
        """Return where `scenario` is held but under `hardware_id` itself: under other ids, or on other worlds.

        The very same scenario comes first. Examples do not count.
        """
        found = [
            holder
            for holder in self._all(scenario)
            if _differ_in_size_alone(holder, scenario) and (holder.differs or holder.hardware_id != hardware_id)
        ]
        return sorted(found, key=lambda holder: (len(holder.differs), holder.hardware_id != hardware_id))

    def nearest(self, scenario: Scenario, hardware_id: str) -> Holder | None:
        """Return the stored scenario that differs in the fewest fields, one of `hardware_id` before others."""
        return min(
            self._all(scenario),
            key=lambda holder: (len(holder.differs), holder.hardware_id != hardware_id),
            default=None,
        )

    @property
    def has_salt(self) -> bool:
        """Whether hashes can be made without making a salt first."""
        return (self.folder / SALT).exists()

    def host_hash(self, host: str) -> str:
        """Return what stands for the host's name in these baselines."""
        return hash_host(self.folder, host)

    def add(
        self,
        document: dict[str, Any],
        hardware_id: str,
        *,
        label: str,
        reason: str | None = None,
        replaces: bool = False,
        example: bool = False,
        scenarios: Sequence[Scenario] | None = None,
    ) -> Path:
        """Store what a run saved into the target `label`, of its `scenarios` or of all; return the file.

        `document` is the run's result file. `SettingError` where it cannot be stored, or is already.
        """
        if not _ID.fullmatch(hardware_id):
            raise SettingError(
                f"{hardware_id!r} cannot be a hardware id: write letters, digits, and . _ + - after the first of them"
            )
        rows = _rows_to_store(document, label, scenarios)
        session = rows[0].record.session
        folder = self.folder / hardware_id
        with self._writing(folder):
            host = self.host_hash(rows[0].record.host)
            folder.mkdir(parents=True, exist_ok=True)
            with only_one(folder, _LOCK_S):
                stored = self.read(hardware_id)
                others = {entry.host for entry in stored.entries if not entry.head.example}
                head = Head(
                    format=1,
                    hardware_id=hardware_id,
                    session=session,
                    saved=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                    plugin=pytest_ckpt.__version__,
                    reason=" ".join(reason.split()) if reason else None,
                    replaces=replaces,
                    example=example,
                    hosts=len(others | {host}),
                )
                data = _rendered(document, rows, head, self.host_hash)
                path = folder / _file_name(folder, head)
                checked = parse_entry(data, path.name, hardware_id)
                if isinstance(checked, Damaged):
                    raise SettingError(f"what was saved into {label} cannot be a baseline: {checked.problem}")
                self.require_new(hardware_id, checked.session, checked.label)
                write_new(path, data)
        return path

    def require_new(self, hardware_id: str, session: str, label: str) -> None:
        """Raise `SettingError` where what this run saved into the target of this label is stored already."""
        for entry in self.read(hardware_id).entries:
            if (entry.session, entry.label) == (session, label):
                raise SettingError(
                    f"what run {session[:8]} saved into {label} is there already: "
                    f"{self.folder / hardware_id / entry.file}"
                )

    def _entry(self, path: Path, hardware_id: str) -> Entry | Damaged:
        """Read a file, or remember what it held: files are added, and rarely changed."""
        try:
            facts = path.lstat()
        except OSError:
            return read_entry(path, hardware_id)
        key = (str(path), facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_mode, hardware_id)
        if key not in self._known:
            self._known[key] = read_entry(path, hardware_id)
        return self._known[key]

    def _all(self, scenario: Scenario) -> Iterator[Holder]:
        for hardware_id in self.ids():
            newest = {}
            for entry in self.read(hardware_id).entries:
                if not entry.head.example:
                    newest.update({full_key(record.scenario): record for record in entry.records})
            for record in newest.values():
                differs = differences(scenario, record.scenario)
                yield Holder(hardware_id, canonical(record.scenario), record.hardware, record.target, differs)

    @contextmanager
    def _writing(self, folder: Path) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise SettingError(f"the baselines in {folder} cannot be written: {error}") from None
        except OSError as error:
            raise SettingError(
                f"the baselines in {folder} cannot be written: {error.strerror}; give a folder that can be, or add "
                "the result file elsewhere with `pytest-ckpt baseline add`"
            ) from None


def _differ_in_size_alone(holder: Holder, scenario: Scenario) -> bool:
    """Return whether a stored scenario is this one, or differs in how many ranks there are, and not in their mesh."""
    names = {difference.name for difference in holder.differs}
    if not names <= _FREE_FIELDS:
        return False
    alike = ("replicate" in holder.scenario.mesh) == ("replicate" in scenario.mesh)
    return not names or ("world_size" in names and alike)


def _rendered(document: dict[str, Any], rows: Sequence[Row], head: Head, host_hash: Callable[[str], str]) -> bytes:
    try:
        return render(baseline_document(document, rows, head, host_hash))
    except (ValueError, RecursionError) as error:
        raise SettingError(f"the result cannot be a baseline: {error}") from None


def runs(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Return the entries by the run that saved them, in the order of each run's first."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.session, []).append(entry)
    return list(found.values())


def _session(run: Sequence[Entry], scenario: Scenario) -> Session:
    return Session(
        source=", ".join(entry.file for entry in run),
        session=run[0].session,
        time=run[0].head.saved,
        host=run[0].host,
        records=[record for entry in run for record in entry.holding(scenario)],
    )


def _rows_to_store(document: dict[str, Any], label: str, scenarios: Sequence[Scenario] | None) -> list[Row]:
    try:
        rows = [row for row in rows_of(document) if row.record.target.label == label]
    except UnusableRows as error:
        raise SettingError(f"the result {error}") from None
    if scenarios is not None:
        wanted = {full_key(scenario) for scenario in scenarios}
        rows = [row for row in rows if full_key(row.record.scenario) in wanted]
    if not rows:
        raise SettingError(f"the result holds no saves into a target {label!r} that could be a baseline")
    named = {row.record.session for row in rows}
    if len(named) > 1:
        raise SettingError("the result holds rows of several runs; give the file of one run")
    if "" in named:
        raise SettingError("the result does not name the run that made it (an older pytest-ckpt did); measure again")
    return rows


def _file_name(folder: Path, head: Head) -> str:
    """Return the next name; numbers of damaged files are taken, too."""
    numbers = [int(match[1]) for name in os.listdir(folder) if (match := _NUMBERED.match(name))]
    number = max(numbers, default=0) + 1
    if number > _LARGEST_NUMBER:
        raise SettingError(f"{folder} has no number left after {_LARGEST_NUMBER}; remove old baselines, git keeps them")
    run = re.sub(r"[^A-Za-z0-9]", "", head.session)[:8] or "run"
    return f"{number:04}_{head.saved[:10].replace('-', '')}_{run}.json"


def _printable(one: Entry | Damaged) -> Entry | Damaged:
    """Return it with a name that steers no terminal: git takes any."""
    if one.file.isprintable():
        return one
    return msgspec.structs.replace(one, file=one.file.encode("unicode_escape", "replace").decode("ascii"))


def _json_names(folder: Path) -> list[str]:
    """Return the names to read, sorted; dot files are the drafts of running saves."""
    return sorted(name for name in os.listdir(folder) if name.endswith(".json") and not name.startswith("."))
