from __future__ import annotations

import msgspec

from pytest_ckpt.judge.bounds import SaveFacts, find_bounds
from pytest_ckpt.judge.findings import bottleneck, find
from pytest_ckpt.records import Probe, RankRound, SaveRecord
from pytest_ckpt.report.explain import explain_lines

from ..judge.made import BYTES, PROBES, one_round, record, volume

SLOW = {"plan": 0.05, "serialize": 0.15, "write": 0.2, "sync": 1.1}


def judged(made: SaveRecord) -> SaveRecord:
    found = find(made)
    return msgspec.structs.replace(made, findings=found, bottleneck=bottleneck(found))


def test_scenario_has_phases_bottleneck_advice_and_what_else_there_is() -> None:
    lines = explain_lines(judged(record(SLOW, others=[volume("/mnt/nvme", 7e9)], root=True)))
    assert lines == [
        "disk llama3-debug r2 sync: where the time went (300 MB in 1.50 s): "
        "sync 1.10 s (73 %), write 200 ms (13 %), serialize 150 ms (10 %), plan 50.0 ms (3 %)",
        "  storage-bound: 87 % of the save is writing and syncing; the target takes 267 MB/s (direct writes, "
        "measured), and 300 MB at that rate are 1.12 s",
        "    -> save to /mnt/nvme, which takes 7.00 GB/s (measured); more writer threads do not help; "
        "--ckpt-mode=async hides this time from training where it is shorter than the interval",
        "  also faster-volume-present: /mnt/nvme (nvme) takes 7.00 GB/s, this target 267 MB/s "
        "(both measured in this run)",
    ]


def test_several_other_findings_are_named_in_one_line() -> None:
    slow = one_round(SLOW, global_syncs=2)
    made = judged(record(rounds=[slow] * 5, folder_bytes=10**10))
    assert explain_lines(made)[-1] == "  also global-sync, size-mismatch: -v or `pytest-ckpt explain -v` tells more"


def test_save_without_bottleneck_says_so_and_names_the_largest_part() -> None:
    assert explain_lines(judged(record()))[1:] == ["  no single bottleneck: the largest part is serialize, 35 %"]
    untraceable = explain_lines(judged(record({"other": 0.9, "plan": 0.1})))
    assert untraceable[1] == "  no single bottleneck: nothing that is measured explains the largest part, 90 %"
    assert untraceable[2].startswith("  unaccounted-time: ")
    assert untraceable[3].startswith("    -> ")


def test_bottleneck_of_a_moment_is_told_without_advice() -> None:
    lines = explain_lines(judged(record({"sync": 0.02, "plan": 0.01})))
    assert lines[1].startswith("  storage-bound: 67 %")
    assert len(lines) == 2


def test_save_that_was_not_traced_has_no_phases_and_no_bottleneck() -> None:
    made = record(rounds=[one_round({"write": 1.0}, phases={}, ranks=[])])
    assert explain_lines(judged(made), name="eight threads") == ["eight threads: 300 MB in 1.00 s, not traced"]


def test_verbose_adds_bounds_probes_all_findings_and_ranks() -> None:
    details = [
        Probe(name="write_direct", bytes=1, seconds=1, Bps=267e6, block_bytes=1),
        Probe(name="write_synced", bytes=0, seconds=0, Bps=None, block_bytes=1, note="disk full"),
    ]
    bounds = find_bounds(BYTES, PROBES, SaveFacts(synced=True, copy="none"))
    ranks = [{"write": 0.5, "wait-1": 0.1}, {"write": 0.6}]
    made = record(
        rounds=[one_round(*ranks)] * 4,
        bounds=bounds,
        efficiency=0.75,
        probes=msgspec.structs.replace(PROBES, details=details),
        root=True,
    )
    lines = explain_lines(judged(made), verbose=True)
    assert lines[1].startswith("  bounds: 1.12 s if all overlapped (storage), ")
    assert lines[1].endswith("this save takes 0.53 of the first; efficiency 75 %")
    assert lines[2] == "  probes: write_direct 267 MB/s, write_synced refused (disk full)"
    assert any(line.startswith("  target-not-a-mount: ") for line in lines)
    assert lines[-2] == "  rank 0: write 500 ms, wait 100 ms; waited 100 ms for rank 1; wrote 150 MB"
    assert lines[-1] == "  rank 1: write 600 ms; wrote 150 MB"


def test_save_between_and_beyond_its_bounds_says_where_it_lies() -> None:
    bounds = find_bounds(BYTES, PROBES, SaveFacts(synced=True, copy="none"))
    assert bounds is not None
    middle = (bounds.overlapped_s + bounds.serial_s) / 2
    between = explain_lines(record({"sync": middle}, bounds=bounds), verbose=True)[1]
    assert "this save lies 50 % of the way from the first to the second" in between
    beyond = explain_lines(record({"sync": 2 * bounds.serial_s}, bounds=bounds), verbose=True)[1]
    assert "this save takes 2 times the second" in beyond


def of_mesh(mesh: str, *planned: int | None) -> SaveRecord:
    made = record()
    ranks = [
        RankRound(save_s=1.0, stall_s=1.0, peak_rss_bytes=None, phases={"write": 1.0}, planned_bytes=size)
        for size in planned
    ]
    rounds = [msgspec.structs.replace(taken, ranks=ranks) for taken in made.rounds]
    return msgspec.structs.replace(
        made, rounds=rounds, scenario=msgspec.structs.replace(made.scenario, mesh=mesh, world_size=len(planned))
    )


def test_who_writes_how_much_is_said_of_every_mesh_but_a_full_shard() -> None:
    hybrid = explain_lines(of_mesh("replicate=2,shard=2", 70_000_000, 80_000_000, 72_000_000, BYTES - 222_000_000))
    assert hybrid[0].startswith("disk llama3-debug r4 replicate=2,shard=2 sync: where")
    assert hybrid[1] == (
        "  bytes per rank: least 70.0 MB, median 75.0 MB, most 80.0 MB; over all ranks 300 MB, each byte once"
    )
    plain = of_mesh("shard=2", BYTES, BYTES)
    assert "bytes per rank" not in "\n".join(explain_lines(plain))
    assert any(line.endswith("over all ranks 600 MB, 2 times the state") for line in explain_lines(plain, verbose=True))


def test_engine_without_plans_is_not_said_to_write_anything() -> None:
    assert "bytes per rank" not in "\n".join(explain_lines(of_mesh("replicate=2,shard=1", None, None)))
