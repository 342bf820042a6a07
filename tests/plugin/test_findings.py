"""Each finding that two ranks on a CPU can have for real: what is wrong with a save is found, and named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .project import SUITE, Project, Result
from .saves import SAVES

FALSE_IN_A_HEALTHY_SAVE = {"uneven-bytes", "page-cache-only", "not-durable", "global-sync", "size-mismatch"}
"""What a default save cannot have, whatever its machine does: a storage may get slower, a rank may be late."""


@pytest.fixture(scope="module")
def saves(module_project: Project) -> tuple[Project, Result]:
    module_project.write("test_saves.py", SAVES)
    result = module_project.pytest(
        "test_saves.py", "--ckpt-rounds=5", "--ckpt-probe=64MiB", "--benchmark-json=run.json"
    )
    return module_project, result.require(0)


@pytest.fixture
def record(saves: tuple[Project, Result]) -> Callable[[str], dict[str, Any]]:
    rows = {row["name"]: row["extra_info"]["ckpt"] for row in saves[0].last()["benchmarks"]}
    return lambda case: rows[f"test_save[r2-{case}]"]


def found(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["id"]: finding for finding in record["findings"]}


def test_save_without_sync_is_said_to_be_in_the_page_cache_or_not_durable(record: Any) -> None:
    """Which of the two, the block device's counters decide, and others write to it as well."""
    ids = set(found(record("unsynced")))
    assert len(ids & {"page-cache-only", "not-durable"}) == 1


def test_stream_without_a_descriptor_makes_dcp_sync_the_host(record: Any) -> None:
    finding = found(record("global-sync"))["global-sync"]
    assert finding["evidence"]["calls"] >= 2
    assert not set(found(record("global-sync"))) & {"page-cache-only", "not-durable"}


def test_delay_of_every_open_is_latency_which_threads_shorten(record: Any) -> None:
    one, four = record("latency-bound"), record("latency-bound-threads")
    assert one["bottleneck"] == "latency-bound"
    finding = found(one)["latency-bound"]
    assert finding["evidence"]["files_a_rank"] >= 40
    assert finding["evidence"]["s_a_file"] >= 0.02
    assert "with more writer threads" in finding["advice"]
    assert "unaccounted-time" not in found(one)
    assert "still more" in found(four)["latency-bound"]["advice"]
    assert median_s(four) < 0.6 * median_s(one)


def test_rank_that_keeps_others_waiting_is_named(record: Any) -> None:
    made = record("straggler")
    assert made["bottleneck"] == "straggler"
    assert found(made)["straggler"]["evidence"]["rank"] == 1
    assert found(made)["straggler"]["evidence"]["waited_s"] == pytest.approx(0.5, abs=0.1)


def test_slow_state_dict_is_told_from_planning(record: Any) -> None:
    made = record("state-dict")
    assert made["bottleneck"] == "plan-bound"
    assert "most of it state_dict()" in found(made)["plan-bound"]["text"]


def test_many_small_tensors_are_plan_bound(record: Any) -> None:
    assert record("plan-bound")["bottleneck"] == "plan-bound"


def test_state_on_one_rank_is_uneven(record: Any) -> None:
    made = record("uneven-bytes")
    finding = found(made)["uneven-bytes"]
    assert finding["evidence"]["rank"] == 0
    assert finding["evidence"]["mean_bytes"] == pytest.approx(finding["evidence"]["most_bytes"] / 2, rel=0.01)
    assert "straggler" not in found(made)


def test_async_save_with_slow_staging_blocks_training(record: Any) -> None:
    made = record("not-overlapped")
    assert made["bottleneck"] == "copy-bound"
    assert found(made)["not-overlapped"]["evidence"]["stall_s"] > 0.6


def test_orphaned_file_is_a_mismatch_of_sizes(record: Any) -> None:
    evidence = found(record("size-mismatch"))["size-mismatch"]["evidence"]
    assert evidence["folder_bytes"] - evidence["stored_bytes"] > 20 * 2**20


def test_work_that_cannot_be_watched_is_unaccounted_for_and_no_bottleneck(
    record: Any, saves: tuple[Project, Result]
) -> None:
    made = record("unaccounted-time")
    assert made["bottleneck"] is None
    assert found(made)["unaccounted-time"]["evidence"]["other_s"] > 0.4
    assert not set(found(made)) & {"page-cache-only", "not-durable"}
    saves[1].lines.fnmatch_lines(["*no single bottleneck: nothing that is measured explains the largest part, * %*"])


def test_writer_that_slows_down_is_throttled_over_time(record: Any) -> None:
    assert "throttled-over-time" in found(record("throttled-over-time"))
    assert "throttled-over-time" not in found(record("straggler"))


def test_slow_first_save_is_a_cold_start_and_information_only(record: Any, saves: tuple[Project, Result]) -> None:
    finding = found(record("cold-start"))["cold-start"]
    assert finding["severity"] == "info"
    assert finding["evidence"]["first_save_s"] > 1.5
    assert "cold-start" not in saves[1].out


def test_target_on_the_root_file_system_is_told(record: Any, saves: tuple[Project, Result]) -> None:
    on_root = saves[0].target.stat().st_dev == os.stat("/").st_dev
    assert ("target-not-a-mount" in found(record("straggler"))) == on_root


def test_rows_have_four_lines_at_most(saves: tuple[Project, Result]) -> None:
    begin = saves[1].out.index("where the time went")
    text = saves[1].out[begin:].partition("figures of this run")[0]
    rows = text.count("where the time went")
    assert rows == len(saves[0].last()["benchmarks"]) - 1  # a row of the async save's stall is no save
    assert len(text.splitlines()) <= 4 * rows + 1


def test_healthy_save_has_no_false_warning(project: Project) -> None:
    project.pytest(*SUITE, "--ckpt-model=llama3-debug", "--ckpt-rounds=5").require(0)
    for row in project.last()["benchmarks"]:
        if "ckpt" in row["extra_info"]:
            findings = row["extra_info"]["ckpt"]["findings"]
            warned = {finding["id"] for finding in findings if finding["severity"] == "warning"}
            assert not warned & FALSE_IN_A_HEALTHY_SAVE


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm")
def test_target_in_memory_is_bound_by_the_cpu_and_never_by_storage(project: Project) -> None:
    project.write("test_saves.py", SAVES)
    project.pytest(
        *("test_saves.py", "-k", "unsynced", "--ckpt-target=memory=/dev/shm", "--ckpt-rounds=4"), target=False
    ).require(0)
    made = project.last()["benchmarks"][0]["extra_info"]["ckpt"]
    assert made["target"]["medium"] == "memory"
    assert made["rounds"][0]["phases"]["serialize"] > 0
    never = {"storage-bound", "latency-bound", "page-cache-only", "not-durable", "faster-volume-present"}
    assert not set(found(made)) & never


def median_s(record: dict[str, Any]) -> float:
    saves = sorted(r["save_s"] for r in record["rounds"])
    middle: float = saves[len(saves) // 2]
    return middle
