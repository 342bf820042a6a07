"""What the rest of pytest-ckpt may ask of a storage target; locations are strings, as URLs will follow."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

LeftoverState = Literal["dead", "live", "kept", "other-host", "unreadable-marker"]


@dataclass(frozen=True)
class Leftover:
    """A work folder found on a target.

    `bytes` is the sum of the apparent sizes of the files that could be read; `created` is in UTC, None where
    no marker tells it. `state` is `dead` (its run was killed), `live` (its run goes on), `kept` (its run kept
    it on purpose), `other-host` (its run was on another machine, so nobody here can tell) or
    `unreadable-marker` (not known to be ours). `detail` is half a sentence for people that says why.
    """

    path: str
    bytes: int
    created: datetime | None
    state: LeftoverState
    detail: str


class WorkFolder(Protocol):
    """The one place of a target that a run writes to and deletes from.

    Savers get plain locations from it instead of handles, because ranks are other processes and DCP's writers
    take paths and URLs.
    """

    @property
    def location(self) -> str:
        """The work folder itself."""

    def new_round(self, name: str) -> str:
        """Return the location for one save: inside the work folder, not there yet, never the same twice."""

    def bytes_in(self, location: str) -> int:
        """Return the sum of the apparent sizes, in bytes, of the files at `location`, no links followed."""

    def remove(self, location: str) -> None:
        """Delete one round; `ValueError` for anything that is not directly inside the work folder."""

    def close(self, keep: bool = False) -> str | None:
        """Delete the work folder and return None, or keep it for people and return its location."""


class Target(Protocol):
    """A place for checkpoints, resolved once, so that what was checked and shown is what is written to."""

    @property
    def label(self) -> str:
        """The target's name in test ids and reports: letters, digits, `_`, `-`; never a path."""

    @property
    def kind(self) -> str:
        """How the target is reached; `path` is a folder in the file system."""

    @property
    def location(self) -> str:
        """The place as resolved, for people and for writing."""

    @property
    def given(self) -> str:
        """The place as the user wrote it."""

    @property
    def filesystem(self) -> str:
        """The file system's type, as in `ext4`, `tmpfs`, `nfs4`."""

    @property
    def medium(self) -> str:
        """`memory` where files live in RAM, else `storage`; the two must never meet in a comparison."""

    @property
    def mount(self) -> str:
        """The mount point that holds the target."""

    def check(self) -> list[str]:
        """Return warnings, a sentence each; `SettingError` if it cannot be used. Writes nothing."""

    def free_bytes(self) -> int:
        """Return the bytes that may still be written, as the target states them now."""

    def open(self) -> WorkFolder:
        """Make a work folder after trying what a save needs; `SettingError` where the target refuses it."""

    def leftovers(self) -> list[Leftover]:
        """Return the folders that killed runs left; those of live runs and kept ones are not among them."""
