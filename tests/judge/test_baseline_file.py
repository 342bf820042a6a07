"""A file of a baseline, whatever it holds: an entry, or one sentence that says what is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pytest_ckpt.judge import baseline_file
from pytest_ckpt.judge.baseline_file import Damaged, Entry, parse_entry, read_entry
from pytest_ckpt.judge.history import csv_lines, history
from pytest_ckpt.judge.store import Store, Stored

from .hostile import HOSTILE, places, put, steers
from .results import ID, PLANTED, result, saved

NAME = "0001_20261130_5f0e1c2d.json"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("baselines")
    seconds = (1.0, 1.25)
    return Store(folder).add(result(saved("async", seconds=seconds)), ID, label="disk").read_bytes()


def damaged(data: bytes | str, name: str = NAME, hardware_id: str = ID) -> str:
    found = parse_entry(data.encode() if isinstance(data, str) else data, name, hardware_id)
    assert isinstance(found, Damaged)
    assert found.file == name
    assert found.problem.startswith("it")
    assert not steers(found.problem)
    return found.problem


def use(found: Entry | Damaged) -> None:
    """What judges and the list do with an entry must not fail either; strings must not steer a terminal."""
    if isinstance(found, Damaged):
        assert not steers(found.problem)
        assert len(found.problem) < 500
        return
    stored = Stored(ID, [found], [])
    for scenario in stored.scenarios(examples=True):
        stored.sessions(scenario)
        assert not any(map(steers, csv_lines(history(stored, scenario))))


def test_entry_tells_what_was_saved(written: bytes) -> None:
    found = parse_entry(written, NAME, ID)
    assert isinstance(found, Entry)
    assert (found.number, found.label, found.commit, found.head.hosts) == (1, "disk", "1f2e3d", 1)
    assert [taken.save_s for taken in found.records[0].rounds] == [1.0, 1.25]


def test_file_is_small_sorted_and_ends_with_a_newline(written: bytes) -> None:
    text = written.decode()
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"
    assert len(text) < 20_000


def test_planted_names_are_really_in_the_result() -> None:
    text = json.dumps(result(saved("async")))
    assert [name for name in PLANTED if name not in text] == []


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_an_entry_or_damaged(data: bytes) -> None:
    use(parse_entry(data, NAME, ID))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), value=HOSTILE)
def test_any_value_at_any_place_is_an_entry_or_damaged(written: bytes, data: st.DataObject, value: Any) -> None:
    document = json.loads(written)
    place = data.draw(st.sampled_from(list(places(document))))
    use(parse_entry(json.dumps(put(document, place, value)).encode(), NAME, ID))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_key_that_is_missing_is_an_entry_or_damaged(written: bytes, data: st.DataObject) -> None:
    document = json.loads(written)
    place = data.draw(st.sampled_from(list(places(document))[1:]))
    within = document
    for key in place[:-1]:
        within = within[key]
    del within[place[-1]]
    use(parse_entry(json.dumps(document).encode(), NAME, ID))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1))
def test_file_that_was_cut_off_is_damaged(written: bytes, share: float) -> None:
    length = int(share * (len(written) - 1))
    assume(length < len(written) - 1)  # without its last newline it is whole
    assert damaged(written[:length]) == "it is empty" or "cut off" in damaged(written[:length])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0), value=st.integers(0, 255))
def test_any_changed_byte_is_an_entry_or_damaged(written: bytes, place: int, value: int) -> None:
    changed = bytearray(written)
    changed[place % len(written)] = value
    use(parse_entry(bytes(changed), NAME, ID))


@pytest.mark.parametrize("data", ["", " \n", "\x00" * 100], ids=["nothing", "blanks", "zeros"])
def test_empty_file_is_damaged(data: str) -> None:
    assert damaged(data).startswith(("it is empty", "it is no JSON"))


def test_plain_file_of_pytest_benchmark_is_foreign() -> None:
    assert damaged(json.dumps({"benchmarks": [{"name": "x", "extra_info": {}}]})) == (
        "it is no baseline of checkpoint saves: it has no record of them"
    )


def test_our_rows_saved_by_pytest_benchmark_itself_are_told_how_to_become_a_baseline() -> None:
    problem = damaged(json.dumps(result(saved())))
    assert "saved by pytest-benchmark itself" in problem
    assert "pytest-ckpt baseline add" in problem


def test_future_formats_are_named(written: bytes) -> None:
    head = put(json.loads(written), ("ckpt_baseline", "format"), 2)
    assert damaged(json.dumps(head)) == "it was written by a newer pytest-ckpt: it has format 2, this one reads 1"
    row = put(json.loads(written), ("benchmarks", 0, "extra_info", "ckpt", "format"), 7)
    assert "newer pytest-ckpt: row 1 has format 7" in damaged(json.dumps(row))


def test_baseline_of_other_hardware_is_not_taken_for_this() -> None:
    text = json.dumps({"ckpt_baseline": {
        "format": 1, "hardware_id": "other", "session": "s", "saved": "2026-11-30T00:00:00+00:00", "plugin": "0",
        "reason": None, "replaces": False, "example": False, "hosts": 1,
    }})  # fmt: skip
    assert damaged(text) == f"it is a baseline of other, and lies in the folder of {ID}"


@pytest.mark.parametrize("figure", ["NaN", "Infinity", "-Infinity", "1e999", "0", "-0.0", "-1", '"1"', "null", "true"])
@pytest.mark.parametrize("name", ["save_s", "stall_s", "throughput_Bps"])
def test_seconds_that_are_none_are_damaged(written: bytes, name: str, figure: str) -> None:
    document = put(json.loads(written), ("benchmarks", 0, "extra_info", "ckpt", "rounds", 0, name), "HERE")
    damaged(json.dumps(document).replace('"HERE"', figure))


def test_rounds_and_data_that_disagree_are_damaged(written: bytes) -> None:
    document = put(json.loads(written), ("benchmarks", 0, "stats", "data", 0), 0.5)
    assert "`stats.data`" in damaged(json.dumps(document))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 500 + "]" * 500])
def test_deep_nesting_is_damaged(text: str) -> None:
    assert damaged(text) == "it is nested too deeply"


def test_number_of_thousands_of_digits_is_damaged() -> None:
    damaged("[" + "9" * 10_000 + "]")


def test_text_that_is_not_utf8_is_damaged() -> None:
    assert damaged('{"a": "ä"}'.encode("latin-1")) == "it is no text in UTF-8"


def test_characters_that_steer_a_terminal_are_damaged(written: bytes) -> None:
    document = put(json.loads(written), ("ckpt_baseline", "reason"), "\x1b[2Jgone")
    assert "control characters" in damaged(json.dumps(document))


def test_rows_of_another_run_are_damaged(written: bytes) -> None:
    document = put(json.loads(written), ("benchmarks", 1, "extra_info", "ckpt", "session"), "other")
    assert "not those of the run" in damaged(json.dumps(document))


def test_row_without_a_record_is_damaged(written: bytes) -> None:
    document = put(json.loads(written), ("benchmarks", 1, "extra_info"), {})
    assert damaged(json.dumps(document)) == "it holds rows without a record of checkpoint saves"


def test_name_of_another_pattern_is_damaged(written: bytes) -> None:
    assert "its name" in damaged(written, "notes.json")


def test_what_is_no_file_is_damaged_and_waits_for_nobody(tmp_path: Path, written: bytes) -> None:
    (tmp_path / "elsewhere.json").write_bytes(written)
    (tmp_path / "0001_link.json").symlink_to(tmp_path / "elsewhere.json")
    (tmp_path / "0002_folder.json").mkdir()
    os.mkfifo(tmp_path / "0003_pipe.json")
    problems = [read_entry(tmp_path / name, ID) for name in ("0001_link.json", "0002_folder.json", "0003_pipe.json")]
    assert [getattr(found, "problem", None) for found in problems] == [
        "it is a symbolic link; only files of the folder itself are read",
        "it is a folder; only files are read",
        "it is no regular file",
    ]
    gone = read_entry(tmp_path / "0004_gone.json", ID)
    assert isinstance(gone, Damaged)
    assert gone.problem == "it cannot be read: No such file or directory"


def test_file_that_is_too_large_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "0001_large.json"
    with path.open("wb") as file:
        file.truncate(baseline_file.LARGEST_BYTES + 1)
    found = read_entry(path, ID)
    assert isinstance(found, Damaged)
    assert found.problem == "it is larger than 64 MiB, which no baseline is"


def test_fields_that_a_later_version_adds_do_no_harm(written: bytes) -> None:
    document = json.loads(written)
    document["ckpt_baseline"]["later"] = document["later"] = 1
    found = parse_entry(json.dumps(document).encode(), NAME, ID)
    assert isinstance(found, Entry)
    assert msgspec.structs.asdict(found.head)["format"] == 1
