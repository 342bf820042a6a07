"""Each finding appears where it should, and not where it must not; the set is closed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_ckpt.judge.findings import RULES, bottleneck, find, is_synced, phase_medians
from pytest_ckpt.records import (
    Finding,
    Probes,
    RankRound,
    Round,
    SaveRecord,
    TargetRecord,
    TrainingBeside,
    Volume,
)
from pytest_ckpt.report.explain import explain_lines

from .made import BYTES, EVEN, one_round, record, volume

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "findings.md"
LATER = {"training-slowed"}
SLOW_DISK = {"plan": 0.05, "serialize": 0.15, "write": 0.2, "sync": 1.1}


def found(made: SaveRecord, id: str) -> Finding | None:
    return next((finding for finding in find(made) if finding.id == id), None)


def the(made: SaveRecord, id: str) -> Finding:
    finding = found(made, id)
    assert finding is not None, [f.id for f in find(made)]
    return finding


def rounds(*saves_s: float, **fields: Any) -> list[Round]:
    return [one_round({name: s * share for name, share in EVEN.items()}, **fields) for s in saves_s]


def far_files(*, sync: float = 0.2, **fields: Any) -> SaveRecord:
    slow = one_round({"other": 1 - sync, "sync": sync}, synced_files=81)
    return record(rounds=[slow] * 5, logical_bytes=1_000_000, **fields)


def straggling(phase: str = "serialize", *, item_bytes: tuple[int, ...] = (), **fields: Any) -> SaveRecord:
    return record(rounds=[one_round({phase: 0.2, "wait-1": 0.8}, {phase: 1.0}, item_bytes=item_bytes)] * 5, **fields)


def beside(slowdown: float, lost_s: float) -> dict[str, Any]:
    """Return what a round holds of training that was slowed."""
    train = TrainingBeside(
        tokens_per_step=128,
        step_s_before=0.1,
        step_s_during=[0.1 * slowdown] * 3,
        step_s_after=0.1,
        waited_for_staging_s=0.0,
        lost_s=lost_s,
        slowdown=slowdown,
        tokens_per_s=1280.0,
    )
    return {"train": train, "train_slowdown": slowdown, "effective_cost_s": 0.1 + lost_s}


APPEARS: dict[str, Callable[[], SaveRecord]] = {
    "storage-bound": lambda: record(SLOW_DISK),
    "latency-bound": far_files,
    "serialize-bound": lambda: record({"serialize": 0.5, "write": 0.3, "sync": 0.2}),
    "copy-bound": lambda: record({"stage": 0.5, "write": 0.3, "sync": 0.2}, mode="async"),
    "plan-bound": lambda: record({"plan": 0.5, "collective": 0.2, "write": 0.3}),
    "straggler": straggling,
    "uneven-bytes": lambda: record(rounds=[one_round(EVEN, item_bytes=(BYTES, 0))] * 5),
    "page-cache-only": lambda: record(rounds=rounds(*[0.2] * 5, synced_files=0)),
    "not-durable": lambda: record(rounds=rounds(*[2.0] * 5, synced_files=0, device_written_bytes=BYTES)),
    "faster-volume-present": lambda: record(others=[volume("/mnt/nvme", 7e9)]),
    "not-overlapped": lambda: record(rounds=rounds(*[1.0] * 5, stall_s=0.7), mode="async"),
    "training-slowed": lambda: record(rounds=rounds(*[1.0] * 5, stall_s=0.1, **beside(1.4, 0.3)), mode="async"),
    "global-sync": lambda: record(rounds=rounds(*[1.0] * 5, global_syncs=2)),
    "throttled-over-time": lambda: record(rounds=rounds(1.0, 1.1, 1.2, 1.3, 1.4)),
    "memory-pressure": lambda: record(rounds=rounds(*[1.0] * 5, least_available_bytes=10**9)),
    "size-mismatch": lambda: record(folder_bytes=BYTES + 50_000_000),
    "unaccounted-time": lambda: record({"other": 0.3, "write": 0.3, "serialize": 0.3, "sync": 0.1}),
    "cold-start": lambda: record(first_save_s=2.0),
    "target-not-a-mount": lambda: record(root=True),
}
ABSENT: dict[str, list[Callable[[], SaveRecord]]] = {
    "storage-bound": [
        lambda: record(SLOW_DISK, medium="memory"),
        lambda: record({"write": 0.3, "sync": 0.1, "serialize": 0.6}),
        lambda: record(rounds=[one_round({"write": 0.1}, synced_files=0)] * 5),  # the page cache took it
        lambda: straggling("write", logical_bytes=10_000_000),  # only rank 1's writing is slow
        lambda: far_files(sync=0.7),
    ],
    "latency-bound": [
        lambda: far_files(probes=None),
        lambda: record(rounds=[one_round({"sync": 1.2}, synced_files=81)] * 5),  # as long as the bytes take
        lambda: record(SLOW_DISK, logical_bytes=1_000_000),  # one file a rank
    ],
    "serialize-bound": [lambda: record({"serialize": 0.3, "write": 0.7})],
    "copy-bound": [lambda: record({"stage": 0.3, "write": 0.7}, mode="async")],
    "plan-bound": [lambda: record({"plan": 0.45, "write": 0.55})],
    "straggler": [
        lambda: record(rounds=straggling().rounds[:2]),  # twice the same of two is chance
        lambda: record(  # in turn
            rounds=[one_round({"serialize": 0.2, "wait-1": 0.8}, {"serialize": 1.0})] * 3
            + [one_round({"serialize": 1.0}, {"serialize": 0.2, "wait-0": 0.8})] * 2
        ),
        lambda: record(  # both wait, for this and for that
            rounds=[one_round({"other": 0.7, "wait-1": 0.3}, {"other": 0.8, "wait-0": 0.2})] * 5
        ),
        lambda: record(  # the coordinator's own duties
            rounds=[one_round({"plan": 0.5, "metadata": 0.2, "write": 0.3}, {"wait-0": 0.7, "write": 0.3})] * 5
        ),
        lambda: straggling(item_bytes=(10, BYTES)),  # it has more to write
        lambda: straggling("sync"),  # served last by a target that is as busy as it can be
        lambda: straggling("sync", logical_bytes=10_000_000, probes=None),  # or may be
        lambda: record(rounds=[one_round({"write": 0.02, "wait-1": 0.06}, {"write": 0.08})] * 5),  # a moment
    ],
    "uneven-bytes": [
        lambda: record(rounds=[one_round(EVEN, item_bytes=(900_000, 10))] * 5),
        lambda: record(rounds=[one_round(EVEN, item_bytes=(0, 0))] * 5),
        lambda: record(rounds=[one_round(EVEN, item_bytes=(120_000_000, 100_000_000))] * 5),
    ],
    "page-cache-only": [
        lambda: record(rounds=rounds(*[0.2] * 5)),
        lambda: record(rounds=rounds(*[0.2] * 5, synced_files=0), medium="memory"),
        lambda: record(rounds=rounds(*[0.2] * 5, synced_files=0, global_syncs=2)),
        lambda: record(rounds=rounds(*[0.2] * 5, synced_files=0, traced=False)),  # it cannot be known
        APPEARS["not-durable"],
    ],
    "not-durable": [record, APPEARS["page-cache-only"], lambda: record(rounds=rounds(1.0, traced=False))],
    "faster-volume-present": [
        lambda: record(others=[volume("/mnt/nvme", None)]),
        lambda: record(others=[volume("/mnt/nvme", 300e6)]),
        lambda: record(others=[volume("/dev/shm", 9e9, "memory")]),
        lambda: record(others=[volume("/mnt/nvme", 7e9)], medium="memory"),
        lambda: record(others=[volume("/mnt/nvme", 7e9)], probes=None),
    ],
    "not-overlapped": [
        lambda: record(rounds=rounds(*[1.0] * 5, stall_s=0.5), mode="async"),
        lambda: record(rounds=rounds(*[0.09] * 5), mode="async"),
        record,
    ],
    "training-slowed": [
        lambda: record(rounds=rounds(*[1.0] * 5, stall_s=0.1, **beside(1.05, 0.3)), mode="async"),
        lambda: record(rounds=rounds(*[1.0] * 5, stall_s=0.1, **beside(1.4, 0.05)), mode="async"),
        record,
    ],
    "global-sync": [record],
    "throttled-over-time": [
        lambda: record(rounds=rounds(1.0, 1.2, 1.4, 1.6)),  # four in order are chance: 1 in 24
        lambda: record(rounds=rounds(1.0, 1.01, 1.02, 1.03, 1.04)),
        lambda: record(rounds=rounds(1.0, 1.5, 1.2, 1.6, 1.3)),
    ],
    "memory-pressure": [
        lambda: record(rounds=rounds(1.0, least_available_bytes=10**10)),
        lambda: record(rounds=rounds(1.0, least_available_bytes=10**9), memory_bytes=None),
    ],
    "size-mismatch": [
        record,
        lambda: record(stored_bytes=None),
        lambda: record(stored_bytes=BYTES + 10**8, folder_bytes=BYTES + 15 * 10**7),  # many tensors, long metadata
    ],
    "unaccounted-time": [record, far_files, lambda: record({"other": 0.05, "write": 0.02})],
    "cold-start": [lambda: record(first_save_s=1.2), lambda: record(rounds=rounds(0.01), first_save_s=0.05)],
    "target-not-a-mount": [record, lambda: record(root=True, medium="memory")],
}


def test_every_rule_is_tried_both_ways() -> None:
    assert list(APPEARS) == list(RULES)
    assert list(ABSENT) == list(RULES)


@pytest.mark.parametrize("id", RULES)
def test_finding_appears_under_its_own_id_with_figures_and_advice(id: str) -> None:
    finding = the(APPEARS[id](), id)
    assert finding.text.startswith(f"{id}: ")
    assert finding.evidence
    assert finding.advice
    assert finding.severity in ("info", "warning")


@pytest.mark.parametrize(("id", "make"), [(id, make) for id, all_of_it in ABSENT.items() for make in all_of_it])
def test_finding_does_not_appear_where_it_must_not(id: str, make: Callable[[], SaveRecord]) -> None:
    assert found(make(), id) is None


def test_healthy_save_has_no_finding_and_no_bottleneck() -> None:
    assert find(record()) == []
    assert bottleneck(find(record())) is None


def test_storage_bound_divides_the_bytes_by_the_measured_rate() -> None:
    made = record({"plan": 0.07, "write": 0.2, "sync": 0.73}, logical_bytes=301_000_000)
    assert the(made, "storage-bound").text == (
        "storage-bound: 93 % of the save is writing and syncing; the target takes 267 MB/s (direct writes, measured), "
        "and 301 MB at that rate are 1.13 s"
    )
    refused = record(SLOW_DISK, probes=Probes(write_synced_Bps=240e6, world_size=2))
    assert "takes 240 MB/s (synced writes, measured)" in the(refused, "storage-bound").text


def test_storage_advice_names_a_measured_volume_with_its_rate_and_an_unmeasured_one_by_its_kind_alone() -> None:
    others = [
        volume("/mnt/nvme", 7e9),
        volume("/dev/shm", 9e9, "memory"),
        volume("/ram", None, "memory"),
        volume("/data", None),
    ]
    advice = the(record(SLOW_DISK, others=others), "storage-bound").advice
    assert advice.startswith("save to /mnt/nvme, which takes 7.00 GB/s (measured)")
    assert the(record(SLOW_DISK, others=others), "faster-volume-present").severity == "warning"
    assert the(record(others=others), "faster-volume-present").severity == "info"
    unmeasured = the(record(SLOW_DISK, others=others[1:]), "storage-bound").advice
    assert unmeasured.startswith("try another volume: /data (nvme), not measured (--ckpt-survey measures them)")
    in_memory = the(record(SLOW_DISK, others=others[1:3]), "storage-bound").advice
    assert in_memory.startswith("save to a faster volume, less often")


def test_advice_does_not_repeat_what_is_done() -> None:
    assert "--ckpt-mode=async" in the(record(SLOW_DISK), "storage-bound").advice
    assert "--ckpt-mode=async" not in the(record(SLOW_DISK, mode="async"), "storage-bound").advice
    staging = {"stage": 0.5, "write": 0.3, "sync": 0.2}
    assert "cache_staged_state_dict" in the(record(staging, mode="async"), "copy-bound").advice
    own = the(record(staging, mode="async", writer="mine:writer"), "copy-bound").advice
    assert "unless this writer does" in own
    fast = {"stage": 0.05, "write": 0.03, "sync": 0.02}
    assert "cache_staged_state_dict" not in the(record(fast, mode="async"), "copy-bound").advice
    assert "cache_staged_state_dict" not in the(record({"copy": 0.6, "write": 0.4}), "copy-bound").advice


def test_threads_are_not_advised_where_several_write_already() -> None:
    phases = {"serialize": 0.3, "write": 0.2}
    assert "thread_count" in the(record(phases), "serialize-bound").advice
    one = one_round(phases)
    busy = [msgspec.structs.replace(rank, thread_s={"serialize": 1.2, "write": 0.8}) for rank in one.ranks]
    several = record(rounds=[msgspec.structs.replace(one, ranks=busy)] * 5)
    assert "several threads write already" in the(several, "serialize-bound").advice


def test_resource_far_faster_when_probed_is_not_blamed_for_its_rate() -> None:
    fast = Probes(write_direct_Bps=5e9, serialize_Bps=20e9, copy_Bps=5e9, copy_warm_Bps=9e9, world_size=2)
    assert "measure it again" in the(record(SLOW_DISK, probes=fast), "storage-bound").advice
    assert "small tensors" in the(record({"serialize": 1.0}, probes=fast), "serialize-bound").advice
    staged = the(record({"stage": 1.0}, mode="async", probes=fast), "copy-bound")
    assert "look at what the stager does" in staged.advice


@pytest.mark.parametrize(
    ("phase", "words"),
    [("state_dict", "state_dict() cheaper"), ("plan", "cache its plans"), ("collective", "network")],
)
def test_plan_bound_says_which_part_and_advises_for_that(phase: str, words: str) -> None:
    made = record({phase: 0.6, "metadata": 0.1, "write": 0.3})
    assert words in the(made, "plan-bound").advice


def test_time_of_a_straggler_is_charged_to_it_and_not_to_its_writing() -> None:
    made = straggling("write", logical_bytes=10_000_000)
    assert [finding.id for finding in find(made)] == ["straggler"]
    assert bottleneck(find(made)) == "straggler"
    assert the(made, "straggler").evidence["rank"] == 1
    assert bottleneck(find(straggling("write"))) == "storage-bound"


def test_rank_with_more_to_write_is_uneven_and_no_straggler_and_a_warning_where_others_wait() -> None:
    uneven = straggling(item_bytes=(10, BYTES))
    assert the(uneven, "uneven-bytes").evidence["waited_s"] == pytest.approx(0.8)
    assert the(uneven, "uneven-bytes").severity == "warning"
    assert {f.id for f in find(uneven)} == {"uneven-bytes", "serialize-bound"}
    assert the(APPEARS["uneven-bytes"](), "uneven-bytes").severity == "info"


def test_bottleneck_is_the_finding_that_explains_most_and_at_least_40_percent() -> None:
    small = record(rounds=[one_round({"write": 0.35, "serialize": 0.3, "wait-1": 0.35}, {**EVEN})] * 5)
    assert the(small, "straggler").explains_s is None
    assert bottleneck(find(small)) is None
    assert bottleneck(find(record(SLOW_DISK))) == find(record(SLOW_DISK))[0].id == "storage-bound"


def test_what_takes_a_moment_only_is_information() -> None:
    assert the(record({"sync": 0.02, "plan": 0.01}), "storage-bound").severity == "info"


def test_unsynced_saves_have_one_finding_and_not_two() -> None:
    for id in ("page-cache-only", "not-durable"):
        made = APPEARS[id]()
        assert not is_synced(made)
        assert len({"page-cache-only", "not-durable"} & {finding.id for finding in find(made)}) == 1


def test_phases_of_a_record_sum_to_its_save() -> None:
    made = record(rounds=[one_round({"write": 0.9, "sync": 0.1}), one_round({"write": 0.2, "sync": 1.0})])
    assert sum(phase_medians(made).values()) == pytest.approx(made.save_s)


def test_ids_are_those_of_the_reference() -> None:
    assert re.findall(r"^### (\S+)", PAGE.read_text(), re.MULTILINE) == [*RULES, *sorted(LATER)]


figures = st.floats(min_value=0, max_value=1e9)
counts = st.integers(0, 2**50)
phases = st.dictionaries(
    st.sampled_from(["write", "sync", "stage", "serialize", "copy", "plan", "collective", "wait", "other"]), figures
)
names = st.sampled_from(["0", "1", "2", "99", "x", "-1", ""])


def structs(kind: type[Any], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Any `kind`, its floats finite and not negative."""
    basic: dict[Any, st.SearchStrategy[Any]] = {
        str: st.text(max_size=5),
        int: counts,
        float: figures,
        bool: st.booleans(),
        float | None: st.none() | figures,
        int | None: st.none() | counts,
        str | None: st.none() | st.text(max_size=5),
        dict[str, float]: phases,
        list[str]: st.just([]),
        list[float]: st.just([]),
    }
    given_by_type = {f.name: basic[f.type] for f in msgspec.structs.fields(kind) if f.type in basic}
    return st.builds(kind, **{**given_by_type, **fields})


ranks = structs(RankRound, waits=st.dictionaries(names, figures))
any_round = structs(Round, ranks=st.lists(ranks, max_size=3))
records = st.builds(
    lambda made, mode, device, **fields: record(mode=mode, device=device, **fields),
    st.none(),
    st.sampled_from(["sync", "async"]),
    st.sampled_from(["cpu", "cuda"]),
    rounds=st.lists(any_round, max_size=5),
    target=structs(TargetRecord, medium=st.sampled_from(["memory", "storage", "network"])),
    probes=st.none() | structs(Probes, details=st.just([])),
    other_volumes=st.lists(structs(Volume), max_size=2),
    logical_bytes=counts,
    stored_bytes=st.none() | counts,
    folder_bytes=counts,
    first_save_s=st.none() | figures,
    memory_bytes=st.none() | counts,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(records)
def test_any_record_has_findings_of_the_closed_set_and_can_be_explained(made: SaveRecord) -> None:
    findings = find(made)
    assert {finding.id for finding in findings} <= set(RULES)
    assert len({finding.id for finding in findings}) == len(findings)
    named = bottleneck(findings)
    assert named is None or next(f.explains_s for f in findings if f.id == named)
    made = msgspec.structs.replace(made, findings=findings, bottleneck=named)
    if made.rounds:
        assert len(explain_lines(made)) <= 4
        assert len(explain_lines(made, verbose=True)) >= 1


def test_there_are_no_findings_of_a_load() -> None:
    assert find(record({"read": 1.0, "other": 9.0}, mode="load-warm", medium="memory", root=True)) == []
