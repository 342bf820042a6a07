"""The folder of baselines: what is added is read again, by one run or by many, and names nobody."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import random
import re
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_ckpt.errors import SettingError
from pytest_ckpt.judge import host_hash, new_file, store
from pytest_ckpt.judge.baseline_document import LEFT_OUT
from pytest_ckpt.judge.baseline_file import Damaged, Entry, parse_entry
from pytest_ckpt.judge.history import csv_lines, history
from pytest_ckpt.judge.scenarios import canonical, differences
from pytest_ckpt.judge.store import Store
from pytest_ckpt.records import Accelerators, Environment, Hardware, SaveRecord, TargetRecord

from .hostile import HOSTILE, places, put, steers
from .results import HOST, ID, PLANTED, SESSION, another, result, saved

OTHER_ID = "epyc-2cpu-nvme-xfs"


@pytest.fixture(scope="module")
def baselines_of_module(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("baselines"))


@pytest.fixture
def baselines(tmp_path: Path) -> Store:
    return Store(tmp_path / "baselines")


def add(baselines: Store, *records: SaveRecord, session: str, hardware_id: str = ID, **options: Any) -> Path:
    """Add what a run of this session saved."""
    of_run = [msgspec.structs.replace(record, session=session, hardware_id=hardware_id) for record in records]
    return baselines.add(result(*of_run), hardware_id, label=of_run[0].target.label, **options)


def without_rounds() -> dict[str, Any]:
    document = result(saved())
    document["benchmarks"][0]["extra_info"]["ckpt"]["rounds"] = []
    return document


def sessions(baselines: Store, record: SaveRecord, hardware_id: str = ID) -> list[str]:
    return [session.session for session in baselines.read(hardware_id).sessions(record.scenario)]


def test_nothing_is_stored_where_there_is_no_folder(baselines: Store) -> None:
    stored = baselines.read(ID)
    assert (baselines.ids(), stored.entries, stored.damaged) == ([], [], [])
    assert stored.sessions(saved().scenario) == []
    assert not baselines.folder.exists()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8))
def test_seconds_come_back_to_the_bit(tmp_path_factory: pytest.TempPathFactory, seconds: list[float]) -> None:
    baselines = Store(tmp_path_factory.mktemp("baselines"))
    record = saved("async", seconds=seconds)
    path = baselines.add(result(record), ID, label="disk")
    (session,) = baselines.read(ID).sessions(record.scenario)
    assert [taken.save_s for taken in session.rounds] == seconds
    assert [taken.stall_s for taken in session.rounds] == [taken.stall_s for taken in record.rounds]
    rows = {row["group"]: row["stats"]["data"] for row in json.loads(path.read_text())["benchmarks"]}
    assert rows == {"save": seconds, "stall": [taken.stall_s for taken in record.rounds]}


def test_session_says_where_and_when_it_was_saved(baselines: Store) -> None:
    path = baselines.add(result(saved()), ID, label="disk", reason="first\n night")
    stored = baselines.read(ID)
    (session,) = stored.sessions(saved().scenario)
    assert re.fullmatch(r"0001_\d{8}_5f0e1c2d\.json", path.name)
    assert (session.source, session.session, session.host) == (path.name, SESSION, baselines.host_hash(HOST))
    assert session.time == stored.entries[0].head.saved
    assert path.name[5:13] == session.time[:10].replace("-", "")
    assert stored.entries[0].head.reason == "first night"


def test_what_judges_is_kept_and_what_does_not_is_left_out(baselines: Store) -> None:
    given = saved("async", hardware=Hardware(cpu="EPYC", cpus=2, usable_cpus=2, memory_bytes=10**9))
    baselines.add(result(given), ID, label="disk")
    (kept,) = baselines.read(ID).entries[0].records
    for name in ("scenario", "environment", "logical_bytes", "bounds", "efficiency", "hardware", "tracing", "method"):
        assert getattr(kept, name) == getattr(given, name), name
    assert kept.probes == given.probes
    assert [taken.phases for taken in kept.rounds] == [taken.phases for taken in given.rounds]
    assert (kept.findings, kept.other_volumes, kept.notes, kept.verdicts) == ([], [], [], [])
    assert all(taken.ranks == [] for taken in kept.rounds)


def test_no_name_of_host_user_or_path_is_in_the_file(baselines: Store) -> None:
    rude = {
        "name": f"test_save[{HOST}-/mnt/alice-data]:on /home/alice",
        "fullname": f"/home/alice/tests/test_save.py::test_save[{HOST}-/mnt/alice-data]:on /home/alice",
        "param": "/mnt/alice-data",
    }
    for number, document in enumerate(
        [
            result(saved("async")),
            result(saved("async"), **rude),
            result(saved("async"), name="test_save[node-0417]", fullname="tests/test_save.py::test_save[node-0417]"),
            result(saved("async", label="node-0417")),
            result(another(saved("async"), options={"cache": "/home/alice", "deep": [{"x": "/mnt/alice-data"}]})),
        ]
    ):
        label = document["benchmarks"][0]["extra_info"]["ckpt"]["target"]["label"]
        text = baselines.add(document, f"id-{number}", label=label).read_text()
        assert [name for name in PLANTED if name in text] == [], text
        assert "UNSERIALIZABLE" not in text
        assert "their_own" not in text


def test_whether_each_field_of_a_record_is_fit_for_a_baseline_was_decided() -> None:
    """A new field goes into baselines unless `baseline_document` leaves it out: decide, then name it here."""
    fit = {
        *("scenario", "environment", "time", "logical_bytes", "stored_bytes", "folder_bytes", "first_save_s"),
        *("predicted_s", "bounds", "efficiency", "bottleneck", "memory_bytes", "session", "hardware_id", "hardware"),
        *("tracing", "start_method", "format", "method", "planning", "hosts"),
    }
    made_fit = {"host", "target", "rounds", "probes"}
    assert fit | made_fit | set(LEFT_OUT) == set(SaveRecord.__struct_fields__)
    assert set(Environment.__struct_fields__) == {"torch", "driver", "kernel", "plugin", "python"}
    assert set(TargetRecord.__struct_fields__) == {
        *("label", "kind", "medium", "mount", "filesystem", "device_model", "storage_class", "storage_rule"),
        *("root_filesystem", "spread"),
    }


def test_load_is_one_row_in_a_group_of_its_own(baselines: Store) -> None:
    path = add(baselines, saved(), saved("load-cold"), session="one")
    rows = json.loads(path.read_text())["benchmarks"]
    assert [row["group"] for row in rows] == ["save", "load"]
    (held,) = (s for s in baselines.read(ID).scenarios() if s.is_load)
    assert held.mode == "load-cold"


def test_groups_of_the_user_stay_and_their_paths_do_not(baselines: Store) -> None:
    def groups(hardware_id: str, group: str) -> list[str]:
        path = baselines.add(result(saved(), group=group), hardware_id, label="disk")
        return [row["group"] for row in json.loads(path.read_text())["benchmarks"]]

    assert groups("a", "my nights save") == ["my nights save"]
    (hidden,) = groups("b", "/home/alice/x save")
    assert re.fullmatch(r"[0-9a-f]{12} save", hidden)


@pytest.mark.parametrize(
    ("fullname", "kept"),
    [
        ("suites/test_save.py::test_save[disk]:stall", "suites/test_save.py::test_save[disk]:stall"),
        ("../../venv/lib/test_save.py::test_save[a::b]", "test_save.py::test_save[a::b]"),
        ("/home/x/test_save.py::TestIt::test_save", "test_save.py::TestIt::test_save"),
        ("test_save", "test_save"),
    ],
)
def test_names_of_tests_are_kept_without_folders_outside_the_project(
    baselines: Store, fullname: str, kept: str
) -> None:
    path = baselines.add(result(saved(), fullname=fullname), ID, label="disk")
    assert [row["fullname"] for row in json.loads(path.read_text())["benchmarks"]] == [kept]


def test_equal_hosts_have_equal_hashes_under_one_salt_only(baselines: Store, tmp_path: Path) -> None:
    first = baselines.host_hash("a")
    assert re.fullmatch("[0-9a-f]{12}", first)
    assert Store(baselines.folder).host_hash("a") == first
    assert baselines.host_hash("b") != first
    assert Store(tmp_path / "others").host_hash("a") != first


def test_damaged_salt_is_refused_and_not_replaced(baselines: Store) -> None:
    baselines.folder.mkdir()
    salt = baselines.folder / ".salt"
    salt.write_text("<<<<<<< HEAD\nabc\n=======\n")
    with pytest.raises(SettingError, match=r"\.salt, is damaged; restore it from git"):
        baselines.add(result(saved()), ID, label="disk")
    assert salt.read_text().startswith("<<<<<<<")


def test_first_salt_wins_where_two_runs_make_one(baselines: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(path: Path, data: bytes) -> None:
        path.write_text("0" * 32)
        new_file.write_new(path, data)

    monkeypatch.setattr(host_hash, "write_new", late)
    baselines.host_hash("a")
    assert (baselines.folder / ".salt").read_text() == "0" * 32


def test_file_says_on_how_many_hosts_the_baseline_stands(baselines: Store) -> None:
    hosts = ["a", "b", "a", "c"]
    for number, host in enumerate(hosts):
        add(baselines, saved(host=host), session=f"s{number}")
    assert [entry.head.hosts for entry in baselines.read(ID).entries] == [1, 2, 2, 3]


def test_each_target_has_a_file_of_its_own(baselines: Store) -> None:
    document = result(saved("sync"), saved("async", label="other"), saved("async"))
    for label, modes in (("disk", ["sync", "async"]), ("other", ["async"])):
        path = baselines.add(document, ID, label=label)
        entry = parse_entry(path.read_bytes(), path.name, ID)
        assert isinstance(entry, Entry)
        assert (entry.label, [record.scenario.mode for record in entry.records]) == (label, modes)


def test_two_equal_drives_of_one_run_are_one_session(baselines: Store) -> None:
    for label in ("nvme0", "nvme1"):
        add(baselines, saved(label=label), session="one")
    (session,) = baselines.read(ID).sessions(saved().scenario)
    assert [record.target.label for record in session.records] == ["nvme0", "nvme1"]
    assert len(session.rounds) == 10
    assert session.source.count(".json") == 2


def test_same_run_and_target_are_added_once(baselines: Store) -> None:
    path = add(baselines, saved(), session="one")
    with pytest.raises(SettingError, match=f"is there already: .*{path.name}"):
        add(baselines, saved(), session="one", replaces=True)
    assert len(baselines.read(ID).entries) == 1


def test_only_wanted_scenarios_are_added(baselines: Store) -> None:
    wanted, unwanted = saved("async"), saved("sync")
    add(baselines, wanted, unwanted, session="one", scenarios=[wanted.scenario])
    assert baselines.read(ID).scenarios() == [wanted.scenario]
    with pytest.raises(SettingError, match="holds no saves into a target 'disk'"):
        add(baselines, wanted, session="two", scenarios=[unwanted.scenario])


def test_scenario_is_found_whatever_its_test_label_and_mount_are_called(baselines: Store) -> None:
    add(baselines, saved(label="old"), session="one")
    moved = saved(label="new", target=msgspec.structs.replace(saved().target, mount="/elsewhere"))
    assert sessions(baselines, moved) == ["one"]
    assert sessions(baselines, another(moved, world_size=4)) == []


def test_option_that_is_a_path_does_not_part_scenarios(baselines: Store) -> None:
    add(baselines, another(saved(), options={"cache": "/mnt/a", "threads": 2}), session="one")
    assert sessions(baselines, another(saved(), options={"cache": "/mnt/b", "threads": 2})) == ["one"]
    assert sessions(baselines, another(saved(), options={"cache": "/mnt/a", "threads": 3})) == []


def test_sessions_are_in_the_order_of_their_numbers(baselines: Store) -> None:
    for name in ("c", "a", "b"):
        add(baselines, saved(), session=name)
    assert sessions(baselines, saved()) == ["c", "a", "b"]


def test_files_of_one_number_that_a_merge_brought_are_both_read(baselines: Store, tmp_path: Path) -> None:
    add(baselines, saved(), session="first")
    branch = Store(tmp_path / "branch")
    (branch.folder / ID).mkdir(parents=True)
    (branch.folder / ".salt").write_bytes((baselines.folder / ".salt").read_bytes())
    (ours,) = (baselines.folder / ID).iterdir()
    theirs = add(branch, saved(), session="theirs")
    theirs.rename(ours.with_name(theirs.name))
    assert sorted(sessions(baselines, saved())) == ["first", "theirs"]
    assert add(baselines, saved(), session="next").name.startswith("0002_")


def test_replacing_leaves_what_was_before_unjudged_for_its_scenarios_only(baselines: Store) -> None:
    sync, asynchronous = saved("sync"), saved("async")
    add(baselines, sync, asynchronous, session="1")
    add(baselines, sync, asynchronous, session="2")
    add(baselines, sync, session="3", replaces=True)
    add(baselines, sync, asynchronous, session="4")
    assert sessions(baselines, sync) == ["3", "4"]
    assert sessions(baselines, asynchronous) == ["1", "2", "4"]
    assert len(baselines.read(ID).entries) == 4


def test_both_drives_of_a_run_that_replaces_are_judged_against(baselines: Store) -> None:
    add(baselines, saved(), session="old")
    for label in ("nvme0", "nvme1"):
        add(baselines, saved(label=label), session="new", replaces=True)
    (session,) = baselines.read(ID).sessions(saved().scenario)
    assert [record.target.label for record in session.records] == ["nvme0", "nvme1"]


def test_examples_judge_nobody(baselines: Store) -> None:
    add(baselines, saved("sync"), saved("async"), session="example", example=True, replaces=True)
    add(baselines, saved("async"), session="real")
    stored = baselines.read(ID)
    assert stored.sessions(saved("sync").scenario) == []
    assert stored.has_only_examples(saved("sync").scenario)
    assert not stored.has_only_examples(saved("async").scenario)
    assert not stored.has_only_examples(another(saved(), model="other").scenario)
    assert [scenario.mode for scenario in stored.scenarios()] == ["async"]
    assert [scenario.mode for scenario in stored.scenarios(examples=True)] == ["sync", "async"]
    assert baselines.holders(saved("sync").scenario, "elsewhere") == []


def test_holder_under_another_id_is_found_with_its_facts(baselines: Store) -> None:
    hardware = Hardware(
        cpu="EPYC", cpus=2, usable_cpus=2, memory_bytes=1, accelerators=[Accelerators(name="H200", count=8)]
    )
    add(baselines, saved(hardware=hardware), session="one", hardware_id=OTHER_ID)
    (holder,) = baselines.holders(saved().scenario, ID)
    assert (holder.hardware_id, holder.hardware, holder.differs) == (OTHER_ID, hardware, [])
    assert holder.target.filesystem == "ext4"
    assert baselines.holders(saved().scenario, OTHER_ID) == []


def test_holder_on_another_world_is_found_after_the_very_same(baselines: Store) -> None:
    add(baselines, another(saved(), world_size=8, mesh="shard=8"), session="one")
    add(baselines, saved(), another(saved(), model="llama3-8b"), session="two", hardware_id=OTHER_ID)
    same, other = baselines.holders(saved().scenario, ID)
    assert (same.hardware_id, other.hardware_id) == (OTHER_ID, ID)
    assert [str(d) for d in other.differs] == ["world_size is 2, there 8", "mesh is shard=2, there shard=8"]


def test_holder_of_another_mesh_or_share_is_another_scenario_and_no_sign_that_something_is_gone(
    baselines: Store,
) -> None:
    hybrid = another(saved(), world_size=4, mesh="replicate=2,shard=2")
    share = another(saved(), mesh="shard=64", share="2/64")
    add(baselines, another(saved(), world_size=4, mesh="shard=4"), session="one", hardware_id=OTHER_ID)
    assert baselines.holders(hybrid.scenario, ID) == []
    assert baselines.holders(share.scenario, ID) == []
    assert len(baselines.holders(saved().scenario, ID)) == 1, "as many replicas, fewer ranks"
    nearest = baselines.nearest(hybrid.scenario, ID)
    assert nearest is not None
    assert [difference.name for difference in nearest.differs] == ["mesh"]


def test_nearest_scenario_differs_least(baselines: Store) -> None:
    assert baselines.nearest(saved().scenario, ID) is None
    add(baselines, another(saved(), model="llama3-8b", params=1, state="bf16"), session="one")
    add(baselines, another(saved(), options={"threads": 4}), session="two", hardware_id=OTHER_ID)
    nearest = baselines.nearest(another(saved(), options={"threads": 2}).scenario, ID)
    assert nearest is not None
    assert (nearest.hardware_id, [d.name for d in nearest.differs]) == (OTHER_ID, ["options.threads"])
    assert (nearest.differs[0].here, nearest.differs[0].there) == (2, 4)


def test_differences_name_fields_in_their_order() -> None:
    scenario = saved().scenario
    assert differences(scenario, scenario) == []
    other = msgspec.structs.replace(scenario, device="cuda", engine="x", options={"a": 1})
    assert [d.name for d in differences(scenario, other)] == ["engine", "options.a", "device"]
    assert canonical(canonical(other)) == canonical(other)


def test_damaged_and_foreign_files_are_named_and_the_others_read(baselines: Store) -> None:
    path = add(baselines, saved(), session="one")
    (path.parent / "0002_x.json").write_bytes(path.read_bytes()[:-100])
    (path.parent / "0003_empty.json").touch()
    (path.parent / "notes.json").write_text("{}")
    (path.parent / ".0004_x.json.12.tmp").write_text("half")
    (path.parent / ".draft.json").write_text("half")
    (path.parent / "README.md").write_text("of ours")
    stored = baselines.read(ID)
    assert [entry.file for entry in stored.entries] == [path.name]
    assert [one.file for one in stored.damaged] == ["0002_x.json", "0003_empty.json", "notes.json"]
    assert add(baselines, saved(), session="two").name.startswith("0004_")


def test_file_that_changed_is_read_again(baselines: Store) -> None:
    path = add(baselines, saved(), session="one")
    assert baselines.read(ID).damaged == []
    path.write_text("{}")
    assert [one.file for one in baselines.read(ID).damaged] == [path.name]
    path.unlink()
    assert baselines.read(ID) == store.Stored(ID, [], [])


def test_id_that_is_a_file_is_named(baselines: Store) -> None:
    baselines.folder.mkdir()
    (baselines.folder / ID).touch()
    assert baselines.read(ID).damaged == [Damaged(".", "it cannot be read: Not a directory")]
    with pytest.raises(SettingError, match="cannot be written"):
        baselines.add(result(saved()), ID, label="disk")


@pytest.mark.parametrize("hardware_id", ["", ".", "..", "a/b", "../x", "a b", "*", ".hidden", "a\n", "x" * 201])
def test_name_that_is_no_id_is_refused(baselines: Store, hardware_id: str) -> None:
    with pytest.raises(SettingError, match="hardware id"):
        baselines.add(result(saved()), hardware_id, label="disk")
    assert not baselines.folder.exists()


def test_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match=r"cannot be (written|read or made): Not a directory"):
        Store(tmp_path / "file" / "baselines").add(result(saved()), ID, label="disk")


def test_full_disk_leaves_no_half_file(baselines: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    add(baselines, saved(), session="one")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SettingError, match="cannot be written: No space left on device"):
        add(baselines, saved(), session="two")
    assert len(os.listdir(baselines.folder / ID)) == 1


def test_file_system_without_hard_links_is_enough(baselines: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    add(baselines, saved(), session="one")
    assert sessions(baselines, saved()) == ["one"]
    with pytest.raises(FileExistsError):
        new_file.write_new(baselines.folder / ".salt", b"")


def test_folder_that_another_holds_is_given_up_after_a_while(baselines: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    add(baselines, saved(), session="one")
    monkeypatch.setattr(store, "_LOCK_S", 0.1)
    with (
        new_file.only_one(baselines.folder / ID, 1),
        pytest.raises(SettingError, match="cannot be written: another run holds its lock"),
    ):
        add(baselines, saved(), session="two")


def test_last_number_is_said(baselines: Store) -> None:
    path = add(baselines, saved(), session="one")
    path.rename(path.with_name("9999_x.json"))
    with pytest.raises(SettingError, match="no number left after 9999"):
        add(baselines, saved(), session="two")


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({}, "is no file of pytest-benchmark"),
        ({"benchmarks": []}, "holds no saves into a target 'disk'"),
        (result(saved(), stats={"data": [1.0]}), "`stats.data` that is not that of the record's rounds"),
        (result(saved(), stats={"mean": float("nan")}), "cannot be a baseline"),
        (result(saved(), group="other"), "ends in none of `save`, `stall`, `load` and `plan`"),
        (result(saved("load-warm"), group="save"), "mode `load-warm` in the group `save`"),
        (result(saved(), group="load"), "mode `sync` in the group `load`"),
        (result(saved(session="")), "does not name the run"),
        (result(saved(), saved("async", session="other")), "rows of several runs"),
        (result(saved(time="\x1b[2J")), "control characters"),
        (without_rounds(), "holds no round"),
    ],
)  # fmt: skip
def test_result_that_cannot_be_a_baseline_is_refused(baselines: Store, document: Any, problem: str) -> None:
    with pytest.raises(SettingError, match=problem):
        baselines.add(document, ID, label="disk")
    assert baselines.ids() == []


@settings(max_examples=200, deadline=None)
@given(data=st.data(), value=HOSTILE)
def test_any_value_at_any_place_of_a_result_is_stored_or_refused(
    baselines_of_module: Store, data: st.DataObject, value: Any
) -> None:
    document = result(saved("async", seconds=(1.0, 2.0), session=secrets.token_hex(16)))
    document = put(document, data.draw(st.sampled_from(list(places(document)))), value)
    try:
        path = baselines_of_module.add(document, ID, label="disk")
    except SettingError as error:
        refused = str(error)
    else:
        refused = ""
        assert isinstance(parse_entry(path.read_bytes(), path.name, ID), Entry)
        path.unlink()
    assert not steers(refused)


def test_history_is_sorted_by_when_it_was_measured(baselines: Store) -> None:
    add(baselines, saved("async", seconds=(2.0,), time="2026-11-03T01:00:00+01:00"), session="late")
    add(baselines, saved("async", seconds=(1.0, 3.0, 1.5)), session="later", replaces=True)
    add(
        baselines,
        saved("async", seconds=(4.0,), time="2026-11-01T00:00:00Z", efficiency=None),
        session="early",
        example=True,
    )
    points = history(baselines.read(ID), saved("async").scenario)
    assert [(point.kind, point.save_s) for point in points] == [("example", 4.0), ("session", 2.0), ("replace", 1.5)]
    lines = list(csv.DictReader(csv_lines(points)))
    assert [line["time"] for line in lines][1:] == ["2026-11-03T00:00:00+00:00", "2026-11-29T23:00:00+00:00"]
    assert lines[2]["save_s"] == "1.5"
    assert lines[0]["efficiency"] == ""
    assert {line["probe_Bps"] for line in lines} == {"267000000.0"}


def _add_some(folder: Path, worker: int, count: int) -> None:
    for number in range(count):
        add(Store(folder), saved(seconds=(worker + 1.0, number + 1.0)), session=f"{worker}{number}" * 8)


def test_eight_processes_that_save_at_once_lose_nothing(baselines: Store) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_add_some, args=(baselines.folder, worker, 3)) for worker in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 8
    stored = baselines.read(ID)
    assert [entry.number for entry in stored.entries] == list(range(1, 25))
    assert {entry.session[:2] for entry in stored.entries} == {f"{w}{n}" for w in range(8) for n in range(3)}
    assert len({entry.host for entry in stored.entries}) == 1
    assert stored.damaged == []
    assert sorted(path.suffix for path in baselines.folder.rglob("*") if path.is_file()) == [""] + [".json"] * 24


@pytest.mark.parametrize("glob", [[], [f"{ID}/*"], ["0002"]], ids=["all", "id", "number"])
def test_pytest_benchmark_compares_baselines_from_another_folder(
    baselines: Store, tmp_path: Path, glob: list[str]
) -> None:
    shuffled = random.Random(0)
    for number in range(2):
        add(baselines, saved("async", seconds=[shuffled.uniform(1, 2) for _ in range(5)]), session=f"s{number}")
    (baselines.folder / "README.md").write_text("of ours")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [sys.executable, "-m", "pytest_benchmark", f"--storage={baselines.folder}", "compare", *glob]
    done = subprocess.run(
        [*command, "--csv=out.csv"], cwd=elsewhere, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    listed = 1 if glob == ["0002"] else 2
    assert len(re.findall(r"^test_save\[disk-async-0\] ", done.stdout, re.MULTILINE)) == listed
    assert len(re.findall(r"^test_save\[disk-async-0\]:stall ", done.stdout, re.MULTILINE)) == listed
    rows = list(csv.DictReader((elsewhere / "out.csv").open()))
    assert len(rows) == 2 * listed
    assert {row["param:ckpt_mode"] for row in rows} == {"async"}
