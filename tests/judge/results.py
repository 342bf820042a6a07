"""Result files made up for the store: what pytest-benchmark writes of a run, with what it should not keep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from pytest_benchmark.stats import Stats

from pytest_ckpt.records import Round, SaveRecord, Scenario, to_plain

from .made import EVEN, one_round, record

HOST = "node-0417.cluster.example"
PLANTED = ("node-0417", "cluster.example", "alice", "/mnt/alice-data", "S3RIAL", "2.5961")
"""What must not be found in a baseline."""
ID = "epyc-2cpu-virtio-ext4"
_STATS: Any = Stats  # pytest-benchmark has no types
SESSION = "5f0e1c2d3b4a59687766554433221100"


def saved(
    mode: str = "sync", *, label: str = "disk", seconds: Sequence[float] = (1.0, 1.1, 0.9, 1.05, 1 / 3), **fields: Any
) -> SaveRecord:
    """Return a record as a run leaves it, of a round for each of `seconds`."""
    made = record(mode=mode, rounds=[_round(save_s, mode) for save_s in seconds])
    target = msgspec.structs.replace(
        made.target, label=label, mount="/mnt/alice-data", storage_rule="/dev/sdb, serial S3RIAL"
    )
    own = {
        "host": HOST,
        "time": "2026-11-29T23:00:00.123456+00:00",
        "session": SESSION,
        "hardware_id": ID,
        "target": target,
        "efficiency": 0.8,
        "notes": ["of alice"],
    }
    return msgspec.structs.replace(made, **{**own, **fields})


def another(record: SaveRecord, **scenario: Any) -> SaveRecord:
    """Return the record as if of a scenario that differs."""
    return msgspec.structs.replace(record, scenario=msgspec.structs.replace(record.scenario, **scenario))


def result(*records: SaveRecord, **row: Any) -> dict[str, Any]:
    """Return the document of a run that saved `records`; `row` replaces keys of each row."""
    rows = [
        {**_benchmark(number, held, group), **row}
        for number, held in enumerate(records)
        for group in _groups(held.scenario)
    ]
    document = {
        "benchmarks": rows,
        "commit_info": {
            "id": "1f2e3d", "time": "2026-11-29T20:00:00+00:00", "dirty": False, "author_time": "2026",
            "branch": "alice/x", "project": "alice-project",
        },
        "datetime": "2026-11-29T23:10:00+00:00",
        "machine_info": {
            "node": HOST, "machine": "x86_64", "processor": "", "system": "Linux", "release": "6.18",
            "python_build": ["main", "alice"], "python_implementation": "CPython", "python_version": "3.11.7",
            "cpu": {"brand_raw": "AMD EPYC", "arch": "X86_64", "bits": 64, "count": 2, "hz_actual": "2.5961 GHz"},
        },
        "version": "5.3.0",
    }  # fmt: skip
    plain: dict[str, Any] = json.loads(json.dumps(document))
    return plain


def write(document: Any, path: Path) -> Path:
    """Write a result file."""
    path.write_text(json.dumps(document))
    return path


def _round(save_s: float, mode: str) -> Round:
    phases = {name: share * save_s for name, share in EVEN.items()}
    blocks = mode == "sync" or mode.startswith("load-")
    made = one_round(phases, stall_s=save_s if blocks else save_s / 7)
    return msgspec.structs.replace(
        made, save_s=save_s, stall_s=save_s if blocks else made.stall_s, throughput_Bps=3e8 / save_s
    )


def _groups(scenario: Scenario) -> tuple[str, ...]:
    if scenario.is_load:
        return ("load",)
    return ("save",) if scenario.mode == "sync" else ("save", "stall")


def _benchmark(number: int, held: SaveRecord, group: str) -> dict[str, Any]:
    stats = _STATS()
    for taken in held.rounds:
        stats.update(taken.stall_s if group == "stall" else taken.save_s)
    name = f"test_save[{held.target.label}-{held.scenario.mode}-{number}]" + (":stall" if group == "stall" else "")
    return {
        "group": group,
        "name": name,
        "fullname": f"../../home/alice/venv/suites/test_save.py::{name}",
        "params": {
            "ckpt_mode": held.scenario.mode,
            "ckpt_ranks": 2,
            "ckpt_target": "UNSERIALIZABLE[Target('/mnt/alice-data')]",
            "their_own": "alice",
        },
        "param": f"{held.target.label}-{held.scenario.mode}",
        "extra_info": {"ckpt": to_plain(held), "their_own": "/home/alice"},
        "options": {"disable_gc": False, "timer": "seconds_of_the_ranks", "cprofile_dump": "/home/alice/x"},
        "stats": {**stats.as_dict(), "data": stats.data, "iterations": 1},
    }
