"""The frame of a trial, without ranks: errors, contents, what is known, and what it deletes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from pytest_ckpt.accept import in_rank
from pytest_ckpt.accept.known import KNOWN
from pytest_ckpt.accept.states import DictSpec, TensorSpec
from pytest_ckpt.accept.trial import CannotSave, Content, NotApplicable, Trial, require_no_error
from pytest_ckpt.save.digest import digest_parts
from pytest_ckpt.save.writers import file_system_writer
from pytest_ckpt.target.workfolder import PathWorkFolder, make_work_folder
from pytest_ckpt.world.functions import reference
from pytest_ckpt.world.rounds import Saving

SPEC = DictSpec({"a": TensorSpec(shape=(2,))})
A, B = torch.arange(6.0), torch.ones(3)


class Replying:
    """A world whose ranks say what they are told to say."""

    size, device, start_method = 2, "cpu", "none"

    def __init__(self, *replies: list[Any]) -> None:
        self.replies = list(replies)
        self.told: list[tuple[Callable[..., Any], dict[str, Any]]] = []

    def run(self, function: Callable[..., Any], /, **arguments: Any) -> list[Any]:
        self.told.append((function, arguments))
        return self.replies.pop(0)

    def renew(self) -> bool:
        return True

    def close(self) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[PathWorkFolder]:
    folder = make_work_folder(str(tmp_path))
    yield folder
    folder.close()


def trial(folder: PathWorkFolder, *replies: list[Any], **given: Any) -> Trial:
    saving = Saving(mode="sync", writer=reference(file_system_writer, "writer"), model="", state="", function=None)
    return Trial(Replying(*replies), folder, saving, world_beside=lambda size: Replying(), **given)


def reply(tensors: dict[str, Any] | None = None, objects: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    return {"tensors": digest_parts(tensors or {}), "objects": objects or {}, "error": None, "seconds": 1.0, **more}


def error(cause: str, origins: list[int], *hints: str) -> dict[str, Any]:
    return {"cause": cause, "origins": origins, "hints": list(hints)}


def test_save_that_ranks_could_not_do_tells_causes_ranks_and_hints_once() -> None:
    told = error("OSError: no", [1], "target full")
    with pytest.raises(CannotSave) as raised:
        require_no_error([reply(error=told), reply(error=told)])
    assert (raised.value.causes, raised.value.ranks, raised.value.hints) == (["OSError: no"], [1], ["target full"])
    assert str(raised.value) == "OSError: no; target full"


def test_rank_that_failed_by_itself_is_named_by_its_place() -> None:
    with pytest.raises(CannotSave) as raised:
        require_no_error([reply(), reply(error=error("ValueError: x", []))])
    assert raised.value.ranks == [1]


def test_each_value_that_differs_is_named_with_both() -> None:
    saved = Content([reply({"a": A, "b": B}, {"step": "3", "name": "'x'"})])
    assert saved.entries == 4
    assert saved.differing(saved) == []
    loaded = Content([reply({"a": A + 1, "b": B}, {"step": "4"})])
    assert saved.differing(loaded) == ["a", "step (4 instead of 3)", "name (nothing instead of 'x')"]


def test_tensor_that_is_missing_or_came_from_nowhere_differs() -> None:
    assert Content([reply({"a": A, "b": B})]).differing(Content([reply({"a": A})])) == ["b"]
    assert Content([reply({"a": A})]).differing(Content([reply({"a": A, "b": B})])) == ["b"]


def test_one_rank_that_loaded_something_else_differs() -> None:
    saved = Content([reply({"a": A}, {"step": "3"})] * 2)
    assert saved.differing(Content([reply({"a": A}, {"step": "3"}), reply({"a": B}, {"step": "3"})])) == ["a"]
    loaded = Content([reply({"a": A}, {"step": "3"}), reply({"a": A}, {"step": "'wiped'"})])
    assert saved.differing(loaded) == ["step ('wiped' instead of 3)"]


def test_replicas_that_differ_are_named_and_each_of_them_may_come_back() -> None:
    saved = Content([reply({"a": A, "b": B}), reply({"a": A + 1, "b": B})])
    assert saved.unequal_replicas == ["a"]
    assert saved.differing(Content([reply({"a": A, "b": B})] * 2)) == []


def test_load_that_gives_something_else_says_how_much(folder: PathWorkFolder) -> None:
    names = [f"t{number}" for number in range(5)]
    wrong = [reply(dict.fromkeys(names, B))]
    tried = trial(folder, [reply(dict.fromkeys(names, A))], wrong)
    saved = tried.save(SPEC)
    with pytest.raises(AssertionError) as raised:
        tried.require_equal(saved)
    assert str(raised.value) == ("what was loaded is not what was saved: t0, t1, t2 and 2 more (5 of 5 entries differ)")


def test_save_takes_as_long_as_its_slowest_rank(folder: PathWorkFolder) -> None:
    assert trial(folder, [reply(seconds=2.0), reply(seconds=3.5)]).save(SPEC).seconds == 3.5


def test_ranks_are_told_plain_data_and_how_to_make_the_engine(folder: PathWorkFolder) -> None:
    tried = trial(folder, [reply(), reply()])
    tried.save(SPEC, 7)
    (function, arguments) = tried.world.told[0]  # type: ignore[attr-defined]
    assert function is in_rank.save
    assert arguments["spec"]["items"]["a"]["shape"] == (2,)
    assert arguments["step"] == 7
    writer = arguments["setup"]["writer"]
    assert writer[:2] == ["pytest_ckpt.save.writers", "file_system_writer"]


def test_known_behaviour_is_of_a_closed_set(folder: PathWorkFolder) -> None:
    tried = trial(folder)
    tried.known("crc-not-checked", "a was wrong")
    assert tried.met == {"crc-not-checked": "a was wrong"}
    with pytest.raises(ValueError, match="'crc' is no known behaviour of DCP; known: not-durable, "):
        tried.known("crc", "")


@pytest.mark.parametrize("known", KNOWN.values(), ids=lambda known: known.id)
def test_known_behaviour_says_what_it_does_what_it_means_and_what_helps(known: Any) -> None:
    for text in (known.does, known.means, known.advice):
        assert len(text) > 20
        assert text == text.strip()
        assert text[-1].isalnum() or text[-1] in ")"


def test_promise_that_does_not_apply_ends_the_test_with_the_reason(folder: PathWorkFolder) -> None:
    with pytest.raises(NotApplicable, match="one rank waits for nobody"):
        trial(folder).not_applicable("one rank waits for nobody")


def test_examples_are_as_many_as_asked_for_and_the_same_each_time(folder: PathWorkFolder) -> None:
    runs: list[list[int]] = [[], []]
    for seen in runs:
        trial(folder, examples=12).for_all(st.integers(), seen.append)
    assert len(runs[0]) == 12
    assert runs[0] == runs[1]


def test_example_that_fails_is_made_small(folder: PathWorkFolder) -> None:
    seen: list[int] = []

    def check(number: int) -> None:
        seen.append(number)
        assert number < 1000

    with pytest.raises(AssertionError):
        trial(folder, examples=100).for_all(st.integers(), check)
    assert seen[-1] == 1000


def test_trial_deletes_what_it_saved_and_nothing_else(folder: PathWorkFolder) -> None:
    others = Path(folder.new_round("others"))
    tried = trial(folder)
    kept, forgotten, never_made = (Path(tried.new_location()) for _ in range(3))
    for path in (others, kept, forgotten):
        path.mkdir()
        (path / "file").touch()
    tried.forget(str(forgotten))
    assert not forgotten.exists()
    tried.close(keep=True)
    assert kept.exists()
    tried.close()
    assert (others.exists(), kept.exists(), never_made.exists()) == (True, False, False)
