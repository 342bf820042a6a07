"""The status board: what a rank is doing, read by its parent from a file."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_ckpt.world.status import StatusBoard, create_status_file, read_status

names = st.text(min_size=1, max_size=40).filter(lambda name: " > " not in name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    create_status_file(tmp_path / "status")
    return tmp_path / "status"


@pytest.fixture
def board(file: Path) -> StatusBoard:
    return StatusBoard(str(file))


def test_parent_reads_the_open_phases_and_since_when(board: StatusBoard, file: Path) -> None:
    assert read_status(file).phase == "idle"
    began = time.monotonic()
    with board.phase("save"), board.phase("write"):
        status = read_status(file)
        assert status.phase == "save > write"
        assert began <= status.since_s <= time.monotonic()
    assert read_status(file).phase == "idle"


def test_rank_that_has_not_opened_its_board_is_starting(file: Path) -> None:
    assert read_status(file).phase == "starting"


def test_phases_of_other_threads_are_told_apart(board: StatusBoard, file: Path) -> None:
    with board.phase("train"):
        thread = threading.Thread(target=board.enter, args=("save",))
        thread.start()
        thread.join(10)
        assert read_status(file).phase == "train; in the background: save"


def test_phase_with_an_owner_is_ended_by_any_thread(board: StatusBoard) -> None:
    board.enter("shared", owner="one")
    thread = threading.Thread(target=board.leave, args=("shared", "one"))
    thread.start()
    thread.join(10)
    assert board.text() == "idle"


def test_leaving_a_phase_ends_what_never_ended_within_it(board: StatusBoard) -> None:
    for name in ("save", "plan", "write"):
        board.enter(name)
    board.leave("plan")
    assert board.text() == "save"
    board.leave("never entered")
    assert board.text() == "save"
    board.clear()
    assert board.text() == "idle"


def test_error_keeps_the_innermost_phase_it_left(board: StatusBoard) -> None:
    with pytest.raises(ValueError) as caught, board.phase("outer"), board.phase("inner"):
        raise ValueError
    assert board.text() == "idle"
    assert board.phase_of(caught.value) == "outer > inner"
    wrapped = RuntimeError()
    wrapped.__cause__ = caught.value
    assert board.phase_of(wrapped) == "outer > inner"
    with board.phase("now"):
        assert board.phase_of(KeyError()) == "now"


@given(phases=st.lists(names, max_size=60))
def test_any_phases_are_read_as_they_were_written_up_to_the_boards_size(
    tmp_path_factory: pytest.TempPathFactory, phases: list[str]
) -> None:
    file = tmp_path_factory.mktemp("status") / "status"
    create_status_file(file)
    board = StatusBoard(str(file))
    for phase in phases:
        board.enter(phase)
    written = " > ".join(phases) or "idle"
    seen = read_status(file).phase
    assert seen.rstrip("\ufffd") == written.encode(errors="replace").decode()[: len(seen.rstrip("\ufffd"))]
    assert len(seen.encode()) >= min(len(written.encode(errors="replace")), 1000) - 4
    for phase in reversed(phases):
        board.leave(phase)
    assert read_status(file).phase == "idle"
