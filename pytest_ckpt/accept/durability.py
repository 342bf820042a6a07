"""What was seen of a save's syncs, and what follows from it: which bytes and names a power cut would spare."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from pytest_ckpt.units import count

ADVICE = (
    "call pytest_ckpt.accept.durable.make_durable(location) at the end of the writer's finish(), or after the save and "
    "before anything relies on it: it syncs every file, .metadata too, and the folders"
)
_NAMES = 3
"""So many files are named in a sentence."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder as it was found."""

    path: str
    """Absolute."""
    device: int
    inode: int
    bytes: int
    changed_ns: int
    """Of a folder: when a name in it was last made, renamed or removed."""
    folder: bool
    dirty_bytes: int | None = None
    """Of a file, in whole pages: what lay in the page cache only; None: the kernel did not tell."""

    @property
    def key(self) -> tuple[int, int]:
        """What it keeps when it is renamed."""
        return self.device, self.inode


class Sync(msgspec.Struct, frozen=True, kw_only=True):
    """One sync of a file or folder that returned without an error."""

    device: int
    inode: int
    bytes: int
    """Its size when the sync began: what is added later is not covered."""
    changed_ns: int
    """When its content had last changed as the sync ended."""
    began_s: float
    with_location: bool
    """Whether the checkpoint's folder was there already, so that a sync of one above it keeps its name."""


class Rename(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder that was given the name `target`, absolute."""

    device: int
    inode: int
    target: str
    at_s: float


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was deleted; `path` is absolute."""

    path: str
    at_s: float


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """A file that Python code opened for writing; with `each_write_synced` (O_SYNC, O_DSYNC) no fsync is needed."""

    device: int
    inode: int
    each_write_synced: bool


Verdict = Literal["durable", "not durable", "cannot tell"]


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """What one process, or all ranks together (`combine`), were seen to do; times are CLOCK_MONOTONIC.

    "Durable" is what POSIX promises, and so what holds on every file system: each byte covered by a sync that
    returned, each name by a later sync of its folder. Whether the device below keeps its word is not seen here.
    """

    location: str
    """The checkpoint's folder, absolute and without links."""
    began_s: float
    ended_s: float
    before: list[Entry]
    """What the location held when the block began."""
    after: list[Entry]
    """What it held when the block ended, the location itself included."""
    above: list[Entry]
    """The folders above the location, from the nearest that was there before the block down to its parent."""
    was_there: bool
    """Whether the location was there before."""
    syncs: list[Sync]
    renames: list[Rename]
    removals: list[Removal]
    opened: list[Opened]
    pages_tell: bool = True
    """False where pages stay dirty after a sync that did its work (ext4 with data=journal)."""

    @property
    def verdict(self) -> Verdict:
        """`cannot tell` where all that is missing are syncs of files that no Python code was seen to open."""
        if self._is_empty():
            return "cannot tell"
        if self._unsynced_bytes() or self._still_dirty() or self._unsynced_names() or self._unsynced_folders():
            return "not durable"
        return "cannot tell" if self._unseen() else "durable"

    @property
    def is_durable(self) -> bool:
        """Whether every byte and every name was seen to be synced when the block ended."""
        return self.verdict == "durable"

    @property
    def sentences(self) -> list[str]:
        """What is wrong, the gravest first; none where the save is durable and replaced nothing in a dangerous way."""
        if self._is_empty():
            return [f"cannot tell: there is no file in {self.location}"]
        missing = [*self._bytes_clauses(), *self._name_clauses()]
        said = [f"not durable: {', '.join(missing)}"] if missing else []
        if unseen := self._unseen():
            said.append(
                f"cannot tell: 0 of {_total(unseen):,} bytes of {self._named(unseen)} were synced "
                "as far as can be seen (written outside Python, or by another process)"
            )
        return said + self._gap_sentences()

    @property
    def advice(self) -> str | None:
        """What makes such a save durable; None where it is."""
        return None if self.is_durable else ADVICE

    def _is_empty(self) -> bool:
        return all(entry.folder for entry in self.after)

    def _files(self) -> list[Entry]:
        """Return the files that the save has made or changed."""
        before = {(entry.path, entry.key): entry for entry in self.before}
        return [
            entry
            for entry in self.after
            if not entry.folder and _content(before.get((entry.path, entry.key))) != _content(entry)
        ]

    def _last_sync(self, entry: Entry) -> Sync | None:
        own = [sync for sync in self.syncs if (sync.device, sync.inode) == entry.key]
        return max(own, key=lambda sync: sync.began_s, default=None)

    def _is_covered(self, entry: Entry) -> bool:
        if any(one.each_write_synced and (one.device, one.inode) == entry.key for one in self.opened):
            return True
        sync = self._last_sync(entry)
        return sync is not None and sync.bytes >= entry.bytes and sync.changed_ns == entry.changed_ns

    def _unsynced(self) -> list[Entry]:
        return [entry for entry in self._files() if not self._is_covered(entry)]

    def _unsynced_bytes(self) -> list[Entry]:
        unseen = self._unseen()
        return [entry for entry in self._unsynced() if entry not in unseen]

    def _unseen(self) -> list[Entry]:
        """Return files of which nothing was seen, and whose pages do not give them away either."""
        seen = {(one.device, one.inode) for one in self.opened} | {(sync.device, sync.inode) for sync in self.syncs}
        return [entry for entry in self._unsynced() if entry.key not in seen and not self._dirty(entry)]

    def _dirty(self, entry: Entry) -> int:
        return min(entry.dirty_bytes or 0, entry.bytes) if self.pages_tell else 0

    def _still_dirty(self) -> list[Entry]:
        """Return files whose sync returned and did nothing, as with libeatmydata or a replaced `os.fsync`."""
        return [entry for entry in self._files() if self._is_covered(entry) and self._dirty(entry)]

    def _folders(self) -> dict[str, Entry]:
        return {entry.path: entry for entry in (*self.above, *self.after) if entry.folder}

    def _unsynced_names(self) -> list[Entry]:
        """Return what was renamed, and whose folder was not synced since."""
        now = {entry.path: entry for entry in (*self.above, *self.after)}
        folders = self._folders()
        unsynced = {}
        for rename in self.renames:
            entry = now.get(rename.target)
            if entry is None or entry.key != (rename.device, rename.inode):
                continue  # renamed again, or somewhere else
            folder = folders.get(os.path.dirname(rename.target))
            if folder is not None and not self._synced_since(folder, rename.at_s):
                unsynced[entry.path] = entry
        return list(unsynced.values())

    def _synced_since(self, folder: Entry, at_s: float) -> bool:
        return any((sync.device, sync.inode) == folder.key and sync.began_s >= at_s for sync in self.syncs)

    def _unsynced_folders(self) -> list[Entry]:
        """Return folders, the location's first, with names that were made, renamed or removed since their last sync."""
        before = {entry.key: entry for entry in self.before if entry.folder}
        unsynced = []
        for folder in (entry for entry in self.after if entry.folder):
            old, sync = before.get(folder.key), self._last_sync(folder)
            if old is not None and old.changed_ns == folder.changed_ns:
                continue
            if sync is None or sync.changed_ns != folder.changed_ns:
                unsynced.append(folder)
        if not self.was_there:
            synced_with = {(sync.device, sync.inode) for sync in self.syncs if sync.with_location}
            unsynced += [folder for folder in reversed(self.above) if folder.key not in synced_with]
        return unsynced

    def _bytes_clauses(self) -> list[str]:
        clauses = []
        short: list[Entry] = []
        again: list[Entry] = []
        for entry in self._unsynced_bytes():
            sync = self._last_sync(entry)
            (again if sync is not None and sync.bytes >= entry.bytes else short).append(entry)
        if short:
            # A sync of more than there is now: of a file that was made shorter since.
            synced = sum(min(sync.bytes, entry.bytes) for entry in short if (sync := self._last_sync(entry)))
            clauses.append(f"{synced:,} of {_total(short):,} bytes of {self._named(short)} were synced")
        if again:
            clauses.append(f"{self._named(again)} {_was(again)} written to after the last sync")
        if dirty := self._still_dirty():
            lying = sum(map(self._dirty, dirty))
            clauses.append(
                f"{lying:,} of {_total(dirty):,} bytes of {self._named(dirty)} lie in the page cache only, "
                "though fsync returned"
            )
        return clauses

    def _name_clauses(self) -> list[str]:
        clauses = []
        renamed, folders = self._unsynced_names(), self._unsynced_folders()
        said = self._unsynced_bytes() + self._still_dirty()
        if renamed and [entry.path for entry in said] == [entry.path for entry in renamed]:
            clauses.append("its rename was not" if len(renamed) == 1 else "their renames were not")
        elif renamed:
            clauses.append(f"the rename of {self._named(renamed)} was not synced")
        inside = [folder for folder in folders if folder not in self.above]
        if inside:
            whose = "the folder" if len(inside) == 1 else count(len(inside), "folder")
            clauses.append(f"nor {whose}" if said or renamed else f"{whose} {_was(inside)} not synced")
        elif folders:
            clauses.append(f"the name of the folder in {folders[0].path} was not synced")
        return clauses

    def _gap_sentences(self) -> list[str]:
        """Return what a crash in the middle would have cost: the checkpoint that was there before."""
        own = [one for one in self.removals if _is_below(one.path, self.location)]
        deleted_first = [
            self._short(removal.path)
            for removal in own
            if any(rename.target == removal.path and rename.at_s >= removal.at_s for rename in self.renames)
        ]
        had_one = any(entry.path.endswith(".metadata") for entry in self.before)
        old = {(entry.path, entry.key) for entry in self.before}
        over = [entry for entry in self._files() if (entry.path, entry.key) in old] if had_one else []
        happened = [f"{self._named(over)} {_was(over)} written over in place"] if over else []
        if deleted_first:
            happened.append(f"{_listed(deleted_first)} was deleted before the new one got its name")
        return [f"a moment without any checkpoint: {', and '.join(happened)}"] if happened else []

    def _named(self, entries: Sequence[Entry]) -> str:
        names = _listed([self._short(entry.path) for entry in entries])
        return names if len(entries) == 1 else f"{count(len(entries), 'file')} ({names})"

    def _short(self, path: str) -> str:
        return os.path.relpath(path, self.location) if _is_below(path, self.location) else path


def combine(audits: Iterable[Audit]) -> Audit:
    """Return what several ranks of one host saw of the same save; `ValueError` where there are none.

    What was there before is told by the rank that began first, what came of it by the one that ended last. Ranks on
    several hosts have clocks of their own: combine those of each host.
    """
    ranks = list(audits)
    if not ranks:
        raise ValueError("no audit to combine")
    first, last = min(ranks, key=lambda one: one.began_s), max(ranks, key=lambda one: one.ended_s)
    return Audit(
        location=first.location,
        began_s=first.began_s,
        ended_s=last.ended_s,
        before=first.before,
        after=last.after,
        above=first.above,
        was_there=first.was_there,
        syncs=[sync for one in ranks for sync in one.syncs],
        renames=[rename for one in ranks for rename in one.renames],
        removals=[removal for one in ranks for removal in one.removals],
        opened=[opened for one in ranks for opened in one.opened],
        pages_tell=last.pages_tell,
    )


def _content(entry: Entry | None) -> tuple[int, int] | None:
    return None if entry is None else (entry.bytes, entry.changed_ns)


def _total(entries: Sequence[Entry]) -> int:
    return sum(entry.bytes for entry in entries)


def _was(entries: Sequence[Entry]) -> str:
    return "was" if len(entries) == 1 else "were"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMES
    return ", ".join(names[:_NAMES]) + (f" and {more} more" if more > 0 else "")


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip("/") + "/")
