"""What became of a scenario over time: a point for each run that is stored, and the lines that Apache Otava reads."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from datetime import datetime, timezone
from statistics import median

import msgspec

from pytest_ckpt.judge.baseline_file import Entry
from pytest_ckpt.judge.scenarios import short_key
from pytest_ckpt.judge.store import Stored, runs
from pytest_ckpt.records import Scenario


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one scenario: medians over its rounds, and what it ran with. The fields are the columns."""

    time: str
    """When it was measured, ISO 8601 in UTC."""
    hardware_id: str
    scenario: str
    """The key that `short_key` gives."""
    model: str
    ranks: int
    mode: str
    save_s: float
    stall_s: float
    throughput_Bps: float
    efficiency: float | None
    """Not known where nothing was probed."""
    probe_Bps: float | None
    """What the target took in the same run."""
    rounds: int
    kind: str
    """`session`, `replace` (what was before is not judged against) or `example`."""
    file: str
    commit: str
    torch: str
    driver: str | None
    kernel: str
    plugin: str
    host: str
    """A salted hash."""


def history(stored: Stored, scenario: Scenario) -> list[Point]:
    """Return the points of a scenario in the order of time, those before a replacement and examples included."""
    held = [entry for entry in stored.entries if entry.holding(scenario)]
    points = [_point(stored.hardware_id, run, scenario) for run in runs(held)]
    return sorted(points, key=lambda point: (point.time, point.file))


def csv_lines(points: Iterable[Point]) -> list[str]:
    """Return the points as comma-separated values, after a line of headings; what is not known is empty."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(Point.__struct_fields__)
    writer.writerows(msgspec.structs.astuple(point) for point in sorted(points, key=lambda point: point.time))
    return buffer.getvalue().splitlines()


def _point(hardware_id: str, run: list[Entry], scenario: Scenario) -> Point:
    records = [record for entry in run for record in entry.holding(scenario)]
    rounds = [taken for record in records for taken in record.rounds]
    first, head, environment = records[0], run[0].head, records[0].environment
    synced = any(taken.synced_files or taken.global_syncs for taken in rounds)
    probed = [record.probes.storage_Bps(synced) for record in records if record.probes]
    return Point(
        time=_utc(first.time, head.saved),
        hardware_id=hardware_id,
        scenario=short_key(scenario),
        model=first.scenario.model,
        ranks=first.scenario.world_size,
        mode=first.scenario.mode,
        save_s=median(taken.save_s for taken in rounds),
        stall_s=median(taken.stall_s for taken in rounds),
        throughput_Bps=median(taken.throughput_Bps for taken in rounds),
        efficiency=_median(record.efficiency for record in records),
        probe_Bps=_median(probed),
        rounds=len(rounds),
        kind="example" if head.example else "replace" if head.replaces else "session",
        file=" ".join(entry.file for entry in run),
        commit=run[0].commit,
        torch=environment.torch,
        driver=environment.driver,
        kernel=environment.kernel,
        plugin=environment.plugin,
        host=run[0].host,
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _utc(measured: str, saved: str) -> str:
    """Return when the run measured or, where it does not say in ISO 8601, when it was saved."""
    try:
        given = datetime.fromisoformat(measured)
        time = (given if given.tzinfo else given.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)
    except (ValueError, OverflowError):
        time = datetime.fromisoformat(saved)
    return time.isoformat(timespec="seconds")
