"""Seeing what a save syncs: Python's own functions for it are watched, in all threads of a process, for a while."""

from __future__ import annotations

import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from pytest_ckpt.accept.dirty_pages import dirty_bytes
from pytest_ckpt.accept.durability import Audit, Entry, Opened, Removal, Rename, Sync
from pytest_ckpt.target.mounts import mount_of

_now = time.monotonic
_SYNCED_WRITES = os.O_SYNC | os.O_DSYNC


@contextmanager
def audit(location: str | os.PathLike[str]) -> Iterator[AuditedSave]:
    """Note what is synced, renamed and deleted while the block runs; `result()` of what it yields tells, afterwards.

    Use it in every rank around a whole save into `location`, which need not be there yet: for an async save, until
    its future is done. All threads are seen. What is not: code outside Python that writes to paths by itself (the
    audit then says "as far as can be seen") and other processes, so that a save of DCP's background process
    (`async-process`, `async-pinned`) cannot be audited here.

    It costs some microseconds an open file, and one pass over the location before and after. Figures taken within are
    none to compare.
    """
    noted = AuditedSave(location)
    noted._start()
    try:
        yield noted
    finally:
        noted._stop()


class AuditedSave:
    """What `audit` noted of one save in this process."""

    def __init__(self, location: str | os.PathLike[str]) -> None:
        self._location = os.path.realpath(location)
        self._syncs: list[Sync] = []
        self._renames: list[Rename] = []
        self._removals: list[Removal] = []
        self._opened: list[Opened] = []
        self._paths: dict[str, None] = {}
        """Of files that were opened for writing, wherever they are: os.sync() syncs these too."""
        self._watch = _Watch(self._watchers())
        self._result: Audit | None = None

    def result(self) -> Audit:
        """Return what was noted; plain data, which `combine` adds up over ranks. Only after the block has ended."""
        if self._result is None:
            raise RuntimeError("the audit is not over: call result() after its block")
        return self._result

    def _start(self) -> None:
        self._was_there = os.path.isdir(self._location)
        self._missing = _missing_above(self._location)
        self._before = _entries(self._location)
        self._began_s = _now()
        self._watch.start()

    def _stop(self) -> None:
        self._watch.stop()
        mount = mount_of(self._location)
        self._result = Audit(
            location=self._location,
            began_s=self._began_s,
            ended_s=_now(),
            before=self._before,
            after=_entries(self._location, with_pages=True),
            above=[entry for path in self._missing if (entry := _entry(path)) is not None],
            was_there=self._was_there,
            syncs=list(self._syncs),
            renames=list(self._renames),
            removals=list(self._removals),
            opened=list(self._opened),
            pages_tell="data=journal" not in mount.options,
        )

    def _watchers(self) -> dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]:
        """Return, for each function's name, what makes a noting one of the real one; arguments have the real names."""

        def synced(real: Callable[..., Any]) -> Callable[..., Any]:
            def sync(fd: Any) -> None:
                self._note_sync(lambda: _statuses([fd if isinstance(fd, int) else fd.fileno()]), lambda: real(fd))

            return sync

        def all_synced(real: Callable[..., Any]) -> Callable[..., Any]:
            return lambda: self._note_sync(self._everything, real)

        def renamed(real: Callable[..., Any]) -> Callable[..., Any]:
            def rename(src: Any, dst: Any, **folders: Any) -> None:
                status = None if folders else _status(src, os.lstat)
                real(src, dst, **folders)
                if status is not None:
                    named = Rename(device=status.st_dev, inode=status.st_ino, target=_spelled(dst), at_s=_now())
                    self._renames.append(named)

            return rename

        def removed(real: Callable[..., Any]) -> Callable[..., Any]:
            def remove(path: Any, **folders: Any) -> None:
                real(path, **folders)
                if not folders:
                    self._removals.append(Removal(path=_spelled(path), at_s=_now()))

            return remove

        def opened(real: Callable[..., Any]) -> Callable[..., Any]:
            def open(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
                stream = real(file, mode, *arguments, **options)
                if not set("wax+").isdisjoint(mode):
                    self._note_open(file, stream.fileno(), synced=False)
                return stream

            return open

        def opened_low(real: Callable[..., Any]) -> Callable[..., Any]:
            def open(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
                descriptor: int = real(path, flags, *arguments, **options)
                if flags & (os.O_WRONLY | os.O_RDWR):
                    self._note_open(path, descriptor, synced=bool(flags & _SYNCED_WRITES))
                return descriptor

            return open

        return {
            "os.fsync": synced,
            "os.fdatasync": synced,
            "os.sync": all_synced,
            "os.rename": renamed,
            "os.replace": renamed,
            "os.unlink": removed,
            "os.remove": removed,
            "os.open": opened_low,
            "io.open": opened,
        }

    def _note_sync(self, what: Callable[[], list[os.stat_result]], sync: Callable[[], None]) -> None:
        began_s, with_location = _now(), os.path.isdir(self._location)
        before = what()
        sync()
        after = {(one.st_dev, one.st_ino): one for one in what()}
        for one in before:
            # A client of a network file system learns the time of change from the server, with the sync.
            changed = after.get((one.st_dev, one.st_ino), one)
            self._syncs.append(
                Sync(
                    device=one.st_dev,
                    inode=one.st_ino,
                    bytes=one.st_size,
                    changed_ns=changed.st_mtime_ns,
                    began_s=began_s,
                    with_location=with_location,
                )
            )

    def _everything(self) -> list[os.stat_result]:
        return _statuses(dict.fromkeys([*self._missing, *_walk(self._location), *list(self._paths)]))

    def _note_open(self, file: Any, descriptor: int, *, synced: bool) -> None:
        status = os.fstat(descriptor)
        self._opened.append(Opened(device=status.st_dev, inode=status.st_ino, each_write_synced=synced))
        if not isinstance(file, int):
            self._paths[_spelled(file)] = None


class _Watch:
    """Puts noting functions in the place of real ones, wherever a module holds them under their own name.

    `sys.addaudithook` would see opening and renaming, but neither fsync nor its size, and can never be taken off again.
    A function that others wrapped or replaced meanwhile is left alone; the one below notes nothing any more.
    """

    def __init__(self, watchers: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]) -> None:
        self._watchers = watchers
        self._on = False
        self._places: list[tuple[Any, str, Any, Any]] = []

    def start(self) -> None:
        self._on = True
        replacements = {}
        for name, watcher in self._watchers.items():
            module, _, attribute = name.partition(".")
            real = getattr(sys.modules[module], attribute)
            replacements[id(real), attribute] = real, self._switched(real, watcher(real))
        names = {attribute for _, attribute in replacements}
        for holder in _holders():
            own = vars(holder)
            for name in names:
                found = own.get(name)
                if found is None or (id(found), name) not in replacements:
                    continue
                real, noting = replacements[id(found), name]
                # On a class a plain function would become a method.
                new = staticmethod(noting) if isinstance(holder, type) else noting
                setattr(holder, name, new)
                self._places.append((holder, name, real, new))

    def stop(self) -> None:
        self._on = False
        for holder, name, real, new in self._places:
            if vars(holder).get(name) is new:
                setattr(holder, name, real)
        self._places.clear()

    def _switched(self, real: Callable[..., Any], noting: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)  # so that it is pickled as the real one is, by name
        def call(*arguments: Any, **options: Any) -> Any:
            return (noting if self._on else real)(*arguments, **options)

        return call


def _holders() -> list[Any]:
    """Return all modules, for there are some that say `from os import fsync`, and pathlib's own of Python 3.10."""
    modules = [module for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
    accessor = getattr(pathlib, "_NormalAccessor", None)
    return modules if accessor is None else [*modules, accessor]


def _walk(location: str) -> Iterator[str]:
    if os.path.isdir(location):
        yield location
    for place, folders, names in os.walk(location):
        for name in (*folders, *names):
            yield os.path.join(place, name)


def _entries(location: str, *, with_pages: bool = False) -> list[Entry]:
    return [entry for path in sorted(_walk(location)) if (entry := _entry(path, with_pages=with_pages)) is not None]


def _entry(path: str, *, with_pages: bool = False) -> Entry | None:
    status = _status(path)
    if status is None:
        return None
    folder = os.path.isdir(path)
    return Entry(
        path=path,
        device=status.st_dev,
        inode=status.st_ino,
        bytes=status.st_size,
        changed_ns=status.st_mtime_ns,
        folder=folder,
        dirty_bytes=dirty_bytes(path) if with_pages and not folder else None,
    )


def _statuses(files: Iterable[Any]) -> list[os.stat_result]:
    return [status for file in files if (status := _status(file)) is not None]


def _status(path: Any, stat: Callable[[Any], os.stat_result] = os.stat) -> os.stat_result | None:
    try:
        return stat(path)
    except OSError:  # gone meanwhile, as a temporary file is, or what the real function will complain of
        return None


def _missing_above(location: str) -> list[str]:
    """Return the folders above that hold a name the save will make: from the nearest that is there to the parent."""
    paths = [os.path.dirname(location)]
    while not os.path.isdir(paths[0]):
        paths.insert(0, os.path.dirname(paths[0]))
    return paths


def _spelled(path: Any) -> str:
    """Return the absolute name of `path` itself, the links on the way to it resolved."""
    folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
    return os.path.join(os.path.realpath(folder), name)
