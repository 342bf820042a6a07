"""What a save costs training on a slow disk: all of it at once, or a little of many steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

from ..plugin.project import SUITE, Project
from ..volumes import loop_volume, throttle


def test_async_save_on_a_slow_disk_stalls_little_and_what_it_loses_is_measured(tmp_path: Path) -> None:
    """Of a sync save stall, save and cost are one; of an async one the cost is the stall and the lost seconds."""
    project = Project(tmp_path)
    results = tmp_path / "run.json"
    with loop_volume(1536 * 2**20) as volume, throttle(volume, 267_000_000) as limit:
        command = [sys.executable, "-m", "pytest", *SUITE, f"--ckpt-target=slow={volume.mount}", "--ckpt-rounds=4"]
        command += ["--ckpt-train=on", "--ckpt-mode=sync", "--ckpt-mode=async", f"--benchmark-json={results}"]
        done = project.run(*limit.command(*command))
    done.require(0)
    rows = json.loads(results.read_text())["benchmarks"]
    rounds = {row["extra_info"]["ckpt"]["scenario"]["mode"]: row["extra_info"]["ckpt"]["rounds"] for row in rows}
    for taken in rounds["sync"]:
        assert taken["stall_s"] == taken["save_s"] == taken["effective_cost_s"]
    for taken in rounds["async"]:
        assert taken["stall_s"] < 0.5 * taken["save_s"]
        assert len(taken["train"]["step_s_during"]) >= 2
        assert taken["effective_cost_s"] >= taken["stall_s"]
    sync_s, async_s = (median(taken["effective_cost_s"] for taken in rounds[mode]) for mode in ("sync", "async"))
    assert async_s < sync_s
