"""Records made up for the judges: a healthy save, and what differs from it."""

from __future__ import annotations

from typing import Any

import msgspec

from pytest_ckpt.records import (
    Environment,
    Probes,
    RankRound,
    Round,
    SaveRecord,
    Scenario,
    TargetRecord,
    Volume,
)

BYTES = 300_000_000
PROBES = Probes(
    write_direct_Bps=267e6,
    write_synced_Bps=240e6,
    write_buffered_Bps=2e9,
    copy_Bps=1e9,
    copy_warm_Bps=5e9,
    serialize_Bps=2e9,
    world_size=2,
)
EVEN = {"state_dict": 0.05, "plan": 0.1, "serialize": 0.35, "write": 0.2, "sync": 0.15, "metadata": 0.1, "other": 0.05}
"""A second in which nothing takes 40 %."""


def record(
    phases: dict[str, float] | None = None,
    *,
    mode: str = "sync",
    writer: str = "FileSystemWriter",
    device: str = "cpu",
    medium: str = "storage",
    root: bool = False,
    others: list[Volume] | None = None,
    rounds: list[Round] | None = None,
    **fields: Any,
) -> SaveRecord:
    """Return the record of five equal rounds of two ranks, each spending `phases`; `fields` are set as they are."""
    made = SaveRecord(
        scenario=Scenario(
            engine="dcp",
            mode=mode,
            writer=writer,
            options={},
            model="llama3-debug",
            state="fp32-adamw",
            params=None,
            world_size=2,
            mesh="shard=2",
            device=device,
        ),
        environment=Environment(torch="2", driver=None, kernel="6", plugin="0", python="3"),
        host="h",
        time="t",
        target=TargetRecord(
            label="disk",
            kind="path",
            medium=medium,
            mount="/" if root else "/mnt/disk",
            filesystem="ext4",
            root_filesystem=root,
        ),
        logical_bytes=BYTES,
        stored_bytes=BYTES + 100_000,
        folder_bytes=BYTES + 200_000,
        rounds=rounds if rounds is not None else [one_round(phases or EVEN)] * 5,
        first_save_s=None,
        probes=PROBES,
        other_volumes=others or [],
        memory_bytes=64 * 10**9,
    )
    return msgspec.structs.replace(made, **fields)


def one_round(
    *ranks: dict[str, float], stall_s: float | None = None, item_bytes: tuple[int, ...] = (), **fields: Any
) -> Round:
    """Return a round whose `ranks` spend these phases (one stands for two equal ranks), as long as the first's sum.

    A phase `wait-N` is waiting for rank N.
    """
    both = ranks if len(ranks) > 1 else ranks * 2
    save_s = sum(both[0].values())
    given: dict[str, Any] = {
        "straggler": 0,
        "peak_rss_bytes": None,
        "phases": _phases(min(both, key=_waiting)),
        "traced": True,
        "synced_files": 3,
        "throughput_Bps": BYTES / save_s,
        "ranks": [
            RankRound(
                save_s=save_s,
                stall_s=save_s,
                peak_rss_bytes=None,
                phases=_phases(phases),
                waits={name.removeprefix("wait-"): s for name, s in phases.items() if name.startswith("wait-")},
                item_bytes=own,
            )
            for phases, own in zip(both, item_bytes or (BYTES // len(both),) * len(both), strict=True)
        ],
    }
    return Round(save_s=save_s, stall_s=save_s if stall_s is None else stall_s, **{**given, **fields})


def volume(mount: str, write_Bps: float | None, medium: str = "storage", storage_class: str = "nvme") -> Volume:
    """Return another volume with room enough."""
    return Volume(mount=mount, medium=medium, storage_class=storage_class, free_bytes=10**13, write_Bps=write_Bps)


def _phases(phases: dict[str, float]) -> dict[str, float]:
    waited = _waiting(phases)
    own = {name: seconds for name, seconds in phases.items() if not name.startswith("wait-")}
    return {**own, "wait": waited} if waited else own


def _waiting(phases: dict[str, float]) -> float:
    return sum(seconds for name, seconds in phases.items() if name.startswith("wait-"))
