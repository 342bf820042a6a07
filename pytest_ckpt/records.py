"""Records of what was measured: immutable, plain, and the schema of `extra_info["ckpt"]` in the result file.

Units stand in the names: `_s` seconds, `_bytes` bytes, `_Bps` bytes per second. The keys are a contract
(docs/reference/result-file.md): they are extended, not renamed, and `format` is raised when one changes its meaning.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import msgspec

FORMAT = 1
METHOD = 1
"""Raised only when what is measured changes, so that figures of different methods are never compared."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One way of saving one model on one world: what identifies a figure, wherever it was measured."""

    engine: str
    mode: str
    writer: str
    options: dict[str, Any]
    model: str
    state: str
    params: int | None
    """Unique parameters of the model; None for a user's own state, whose parameters are not known."""
    world_size: int
    mesh: str
    device: str
    share: str | None = None


class RankRound(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a round, in seconds from the first rank's call."""

    save_s: float
    stall_s: float
    peak_rss_bytes: int | None
    """Peak resident memory above the level before the round; None where the kernel does not let it be reset."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One save, over all ranks."""

    save_s: float
    stall_s: float
    throughput_Bps: float
    ranks: list[RankRound]
    straggler: int
    """The rank that was last."""
    peak_rss_bytes: int | None
    """Sum over ranks."""


class TargetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Where the checkpoints went."""

    label: str
    kind: str
    medium: str
    mount: str
    filesystem: str


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The software that made the figures: a difference is judged, and named."""

    torch: str
    driver: str | None
    kernel: str
    plugin: str
    python: str


class SaveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one scenario on one target."""

    scenario: Scenario
    environment: Environment
    host: str
    time: str
    """Start of the scenario, ISO 8601 in UTC."""
    target: TargetRecord
    logical_bytes: int
    """Bytes of the state's tensors, from the model alone (0-dim step counters not counted)."""
    stored_bytes: int | None
    """Sum of the ranges that the checkpoint's metadata refers to; None where a writer does not say."""
    folder_bytes: int
    """Apparent size of the files that a round left."""
    rounds: list[Round]
    first_save_s: float | None
    """Seconds of the first save of the fresh world (or the first of this scenario in a reused one): no round."""
    notes: list[str] = []
    format: int = FORMAT
    method: int = METHOD

    @property
    def save_s(self) -> float:
        """Median over the rounds of the seconds until the checkpoint was complete."""
        return median(r.save_s for r in self.rounds)

    @property
    def stall_s(self) -> float:
        """Median over the rounds of the seconds in which training could not go on."""
        return median(r.stall_s for r in self.rounds)

    @property
    def throughput_Bps(self) -> float:
        """Median over the rounds of `logical_bytes / save_s`."""
        return median(r.throughput_Bps for r in self.rounds)


def to_plain(record: SaveRecord) -> dict[str, Any]:
    """Return the record as the plain dictionary that goes into the result file."""
    plain: dict[str, Any] = msgspec.to_builtins(record)
    return plain


def from_plain(plain: Any) -> SaveRecord:
    """Return the record that a result file holds; `msgspec.ValidationError` where it is none."""
    return msgspec.convert(plain, SaveRecord)


def summarize_round(
    called_s: list[float],
    returned_s: list[float],
    completed_s: list[float],
    peak_rss_bytes: list[int | None],
    *,
    logical_bytes: int,
    blocks_until_complete: bool,
) -> Round:
    """Return one round from each rank's clock readings (CLOCK_MONOTONIC, one axis for a host's ranks).

    `called_s`, `returned_s`, `completed_s` hold one reading per rank: before the call, when it returned, and when
    the checkpoint was complete. The save lasts from the first call to the last completion; training is blocked
    from a rank's own call to its return, or until completion where the mode is synchronous.
    """
    start = min(called_s)
    save_s = max(completed_s) - start
    own_stall_s = [returned - called for called, returned in zip(called_s, returned_s, strict=True)]
    known_peaks = [peak for peak in peak_rss_bytes if peak is not None]
    return Round(
        save_s=save_s,
        stall_s=save_s if blocks_until_complete else max(own_stall_s),
        throughput_Bps=logical_bytes / save_s,
        ranks=[
            RankRound(save_s=done - start, stall_s=stall, peak_rss_bytes=peak)
            for done, stall, peak in zip(completed_s, own_stall_s, peak_rss_bytes, strict=True)
        ],
        straggler=completed_s.index(max(completed_s)),
        peak_rss_bytes=sum(known_peaks) if len(known_peaks) == len(peak_rss_bytes) else None,
    )
