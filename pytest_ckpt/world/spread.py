"""A target on several hosts: one file system that all of them see, or a disk of its own on each; found by writing.

Where each host has its own, the work folder is made on all of them under one name, and cleaned on all of them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from pytest_ckpt.errors import CkptError, SettingError
from pytest_ckpt.measure.hardware import find_hardware
from pytest_ckpt.records import Hardware
from pytest_ckpt.target.interface import WorkFolder
from pytest_ckpt.target.path import open_target
from pytest_ckpt.target.space import require_space, tree_bytes
from pytest_ckpt.target.spec import TargetSpec
from pytest_ckpt.target.workfolder import PathWorkFolder, make_work_folder
from pytest_ckpt.world.context import Rank

_LOOK_S = 5.0
"""A network file system may show a new folder late: clients keep what they know of a folder for seconds."""
_CLOSE_S = 10.0
_TOKEN = "seen-by-all"

_twins: dict[str, PathWorkFolder] = {}
"""Of this process: the work folders that it made for its host."""


class ManyHosts(Protocol):
    """What this needs of an attached world."""

    hosts: tuple[int, ...]

    def keep_house(self, function: Callable[..., Any], /, *, timeout_s: float = 60.0, **arguments: Any) -> list[Any]:
        """Run a function on all ranks, outside of a test's calls."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How a target is spread over the hosts."""

    shared: bool
    hosts: int

    @property
    def text(self) -> str:
        """In words."""
        return f"shared by {self.hosts} hosts" if self.shared else f"a local disk on each of {self.hosts} hosts"


def find_spread(world: ManyHosts, folder: WorkFolder) -> Spread:
    """Return whether all hosts see `folder`; `SettingError` where some do and others do not."""
    path = os.path.join(folder.location, _TOKEN)
    with open(path, "x") as file:
        file.write("pytest-ckpt\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        seen = world.keep_house(look_for, path=path)
    finally:
        os.unlink(path)
    by_host = {host: seen[rank] for rank, host in reversed(list(enumerate(world.hosts))) if seen[rank] is not None}
    others = {by_host[host] for host in by_host if host != 0}
    if len(others) == 2:
        blind = ", ".join(str(host) for host in sorted(by_host) if not by_host[host])
        raise SettingError(
            f"{os.path.dirname(folder.location)} is one file system for some hosts, and another for host {blind}: "
            "mount it on all of them, or give another --ckpt-target"
        )
    return Spread(shared=others == {True}, hosts=len(by_host))


class SpreadFolder:
    """A `WorkFolder` that is on every host, each with a disk of its own, under one name."""

    def __init__(self, world: ManyHosts, own: WorkFolder) -> None:
        self._world, self._own = world, own
        refused = [text for text in world.keep_house(make_twin, path=own.location) if text]
        if refused:
            raise SettingError(refused[0])

    @property
    def location(self) -> str:
        """The work folder, the same path on each host."""
        return self._own.location

    def new_round(self, name: str) -> str:
        """See `WorkFolder`."""
        return self._own.new_round(name)

    def bytes_in(self, location: str) -> int:
        """See `WorkFolder`: the sum over the hosts."""
        others: list[int] = self._world.keep_house(bytes_in_twin, location=location)
        return self._own.bytes_in(location) + sum(others)

    def remove(self, location: str) -> None:
        """See `WorkFolder`: on all hosts."""
        self._own.remove(location)
        failed = [text for text in self._world.keep_house(remove_in_twin, location=location) if text]
        if failed:
            raise OSError(failed[0])

    def require_space(self, need_bytes: Callable[[int], int]) -> None:
        """Raise `CannotFit` naming the first host whose disk has no room for the `need_bytes` of that host."""
        disk = os.path.dirname(self.location)
        for rank, free in enumerate(self._world.keep_house(free_here, path=self.location)):
            host = self._world.hosts[rank]
            if isinstance(free, str):
                raise SettingError(f"{disk} on host {host} does not say how much is free: {free}")
            if free is not None:
                require_space(need_bytes(host), free, disk, f"the part of the save on host {host}", f" on host {host}")

    def close(self, keep: bool = False) -> str | None:
        """See `WorkFolder`: on all hosts."""
        kept = self._own.close(keep)
        try:
            failed = self._world.keep_house(close_twin, timeout_s=_CLOSE_S, path=self.location, keep=keep)
        except CkptError as error:  # each host then closes its own as it leaves
            raise OSError(f"on other hosts: {error}") from None
        if any(failed):
            raise OSError(next(filter(None, failed)))
        return kept

    def own_bytes_in(self, location: str) -> int:
        """Return the bytes at `location` on this host, which asks no other."""
        return self._own.bytes_in(location)


def close_twins(keep: bool) -> None:
    """Close the work folders of this process that nobody has closed; `keep` as of `WorkFolder.close`."""
    while _twins:
        with contextlib.suppress(OSError):  # `clean` can finish it
            _twins.popitem()[1].close(keep)


def hardware_of_hosts(world: ManyHosts) -> dict[int, Hardware]:
    """Return what each host is."""
    found = world.keep_house(hardware_here)
    return {
        host: msgspec.convert(found[rank], Hardware) for rank, host in enumerate(world.hosts) if found[rank] is not None
    }


# What runs in a rank


def look_for(rank: Rank, *, path: str) -> bool | None:
    """Return whether this host sees the file `path`; None on other ranks than a host's first."""
    if not rank.leads_host:
        return None
    deadline = time.monotonic() + _LOOK_S
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def make_twin(rank: Rank, *, path: str) -> str | None:
    """Make the work folder `path` on this host too; returns why it cannot be made."""
    if not _makes_twin(rank):
        return None
    try:
        _twins[path] = make_work_folder(os.path.dirname(path), os.path.basename(path))
    except (SettingError, OSError) as error:
        return f"host {rank.host}: {error}"
    return None


def free_here(rank: Rank, *, path: str) -> int | str | None:
    """Return the bytes that may still be written beside the work folder `path` on this host, or why nobody knows.

    None on other ranks than a host's first.
    """
    if not rank.leads_host:
        return None
    try:
        return open_target(TargetSpec("disk", os.path.dirname(path), source="the first host")).free_bytes()
    except (SettingError, OSError) as error:
        return str(error)


def bytes_in_twin(rank: Rank, *, location: str) -> int:
    """Return the bytes at `location` of this host's own folder; zero on other ranks, and where nothing is."""
    if not _makes_twin(rank):
        return 0
    try:
        return tree_bytes(location)
    except OSError:
        return 0


def remove_in_twin(rank: Rank, *, location: str) -> str | None:
    """Delete a round of this host's own folder; returns what could not be deleted."""
    return _tried(rank, lambda: _twins[os.path.dirname(location)].remove(location))


def close_twin(rank: Rank, *, path: str, keep: bool) -> str | None:
    """Delete or keep this host's own folder; returns what could not be deleted."""
    return _tried(rank, lambda: _twins.pop(path).close(keep))


def hardware_here(rank: Rank) -> dict[str, Any] | None:
    """Return what this host is; None on other ranks than its first."""
    plain: dict[str, Any] | None = msgspec.to_builtins(find_hardware()) if rank.leads_host else None
    return plain


def _makes_twin(rank: Rank) -> bool:
    return rank.leads_host and rank.host != 0


def _tried(rank: Rank, do: Callable[[], Any]) -> str | None:
    if not _makes_twin(rank):
        return None
    try:
        do()
    except (OSError, KeyError) as error:
        return f"host {rank.host}: {error}"
    return None
