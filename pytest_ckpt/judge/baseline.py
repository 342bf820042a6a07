"""What a baseline is to those who judge: the sessions of one scenario on one hardware, oldest first."""

from __future__ import annotations

import msgspec

from pytest_ckpt.records import Round, SaveRecord

WANTED_SESSIONS = 5
"""The spread between sessions, not between rounds, is what limits a verdict."""


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """What one run measured of one scenario, as it is stored."""

    source: str
    """The file's name."""
    session: str
    """The run's random name."""
    time: str
    """When it was saved, ISO 8601 in UTC."""
    host: str
    """A salted hash of the host's name: equal for equal hosts, and no more than that."""
    records: list[SaveRecord]
    """One, or several where the run measured the scenario more than once: two tests, two equal drives."""

    @property
    def rounds(self) -> list[Round]:
        """The rounds of all its records."""
        return [taken for record in self.records for taken in record.rounds]


def recent(sessions: list[Session]) -> list[Session]:
    """Return the last sessions, those that a run is judged against."""
    return sessions[-WANTED_SESSIONS:]


def anchor(sessions: list[Session]) -> list[Session]:
    """Return the first sessions, against which many small steps add up; the same as `recent` while there are few."""
    return sessions[:WANTED_SESSIONS]
