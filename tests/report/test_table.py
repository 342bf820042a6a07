from __future__ import annotations

import msgspec

from pytest_ckpt.records import Environment, Round, SaveRecord, Scenario, TargetRecord
from pytest_ckpt.report.table import summary_lines


def record(saves_s: list[float], mode: str = "async") -> SaveRecord:
    return SaveRecord(
        scenario=Scenario(
            engine="dcp",
            mode=mode,
            writer="FileSystemWriter",
            options={},
            model="llama3-8b",
            state="fp32-adamw",
            params=None,
            world_size=8,
            mesh="shard=8",
            device="cuda",
        ),
        environment=Environment(torch="2", driver=None, kernel="6", plugin="0", python="3"),
        host="h",
        time="t",
        target=TargetRecord(label="nvme", kind="path", medium="storage", mount="/", filesystem="ext4"),
        logical_bytes=10**9,
        stored_bytes=None,
        folder_bytes=0,
        rounds=[
            Round(save_s=s, stall_s=s / 10, throughput_Bps=1e9 / s, ranks=[], straggler=0, peak_rss_bytes=None)
            for s in saves_s
        ],
        first_save_s=9.0,
    )


def test_a_line_holds_medians_with_least_and_greatest() -> None:
    heading, line = summary_lines([(None, record([2.0, 4.0, 3.0]))], 80)
    assert " ".join(heading.split()) == "target model ranks mode rounds save (min .. max) stall GB/s first save"
    assert " ".join(line.split()) == "nvme llama3-8b 8 async 3 3.00 s (2.00 s .. 4.00 s) 300 ms 0.33 9.00 s"


def test_names_get_a_column_where_there_are_any() -> None:
    heading, one, other = summary_lines([("eight", record([1.0])), (None, record([1.0]))], 80)
    assert heading.split()[0] == "name"
    assert one.split()[:2] == ["eight", "nvme"]
    assert other.split()[0] == "nvme"


def test_a_markup_like_name_is_printed_as_it_is() -> None:
    lines = summary_lines([("[red]", record([1.0]))], 80)
    assert lines[1].startswith("[red]")


def test_loads_have_a_table_of_their_own_which_says_who_saved() -> None:
    load, other = record([2.0, 4.0, 3.0], mode="load-cold"), record([1.0], mode="load-warm")
    scenario = msgspec.structs.replace(load.scenario, options={"saved_ranks": 16})
    rows = [(None, record([1.0])), (None, msgspec.structs.replace(load, scenario=scenario)), (None, other)]
    heading, _, loads, one, two = (" ".join(line.split()) for line in summary_lines(rows, 80))
    assert heading.startswith("target model ranks mode rounds save")
    assert loads == "target model ranks saved by mode rounds load (min .. max) GB/s first load"
    assert one == "nvme llama3-8b 8 16 load-cold 3 3.00 s (2.00 s .. 4.00 s) 0.33 9.00 s"
    assert two.startswith("nvme llama3-8b 8 8 load-warm 1 1.00 s")


def test_meshes_and_shares_get_a_column_where_there_are_any() -> None:
    plain, hybrid, share = record([1.0]), record([1.0]), record([1.0])
    hybrid = msgspec.structs.replace(
        hybrid, scenario=msgspec.structs.replace(hybrid.scenario, mesh="replicate=2,shard=4")
    )
    share = msgspec.structs.replace(
        share, scenario=msgspec.structs.replace(share.scenario, mesh="shard=64", share="8/64")
    )
    heading, *lines = (
        " ".join(line.split()) for line in summary_lines([(None, r) for r in (plain, hybrid, share)], 80)
    )
    assert heading.startswith("target model ranks mesh mode rounds")
    for line, words in zip(lines, ("shard=8", "replicate=2,shard=4", "share 8/64"), strict=True):
        assert line.startswith(f"nvme llama3-8b 8 {words} async 1")
