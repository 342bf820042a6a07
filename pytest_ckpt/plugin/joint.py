"""How a phase of a test ends on all ranks, from how it ended on each; exceptions as plain data."""

from __future__ import annotations

import contextlib
import unittest
from itertools import zip_longest
from typing import Any

import msgspec
import pytest

from pytest_ckpt import errors
from pytest_ckpt.errors import CkptError
from pytest_ckpt.units import count
from pytest_ckpt.world.attached import LeftTheCall
from pytest_ckpt.world.control import Hello
from pytest_ckpt.world.interface import FailedRank, RankFailure
from pytest_ckpt.world.members import Outcome

COLLECTION = "the collection of tests"
_TAKEN = "_ckpt_taken_along"


def collection_difference(ranks: list[Hello]) -> str | None:
    """Return the first difference between what rank 0 collected and what another rank did; None where all agree."""
    mine = ranks[0]
    for other in ranks[1:]:
        if other.errors != mine.errors:
            return (
                f"rank {other.rank} (on {other.host}) had {count(other.errors, 'error')} while it collected tests, "
                f"and rank 0 {mine.errors}; all ranks must see the same files and packages"
            )
        for number, (here, there) in enumerate(zip_longest(mine.tests, other.tests), 1):
            if here != there:
                return (
                    f"the ranks collected different tests: number {number} is {here or 'none'} on rank 0, and "
                    f"{there or 'none'} on rank {other.rank} (on {other.host}); all ranks must run the same pytest "
                    "command on the same files (with --lf, on one cache)"
                )
    return None


def joint_outcome(outcomes: dict[int, Outcome]) -> tuple[str, str, list[int]]:
    """Return how a phase of a test ends on all ranks: its kind, why, and the ranks that it comes from.

    What fails goes before what skips, and a rank's own reason before what it was taken along by.
    """
    for taken in (False, True):
        for kinds in (("failed",), ("lost",), ("skipped",), ("xfailed",)):
            texts: dict[str, list[int]] = {}
            for rank, outcome in outcomes.items():
                if outcome.kind in kinds and outcome.taken == taken:
                    texts.setdefault(outcome.text, []).append(rank)
            if texts:
                verb = "failed" if kinds == ("lost",) else kinds[0]
                parts = [_of_ranks(ranks, verb, text) for text, ranks in texts.items()]
                return verb, "\n".join(parts), sorted(rank for ranks in texts.values() for rank in ranks)
    return "passed", "", []


def _of_ranks(ranks: list[int], verb: str, text: str) -> str:
    words = rank_words(ranks)
    return text if text.startswith(f"{words} ") else f"{words} {verb}: {text}"


def rank_words(ranks: list[int]) -> str:
    """Return the ranks in words."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def outcome_of(item: pytest.Item, at: str, error: BaseException) -> Outcome:
    """Return how this rank's test ended with `error`, with its report as pytest would show it."""
    taken = _is_taken(error)
    if isinstance(error, pytest.skip.Exception | unittest.SkipTest):
        return Outcome(at=at, kind="skipped", taken=taken, text=_encodable(str(error)))
    if isinstance(error, pytest.xfail.Exception):
        return Outcome(at=at, kind="xfailed", taken=taken, text=_encodable(str(error)))
    first = (str(error).strip() or "no message").splitlines()[0]
    shown = _plain_text(item, error)
    # `pytest.fail` is no exception to whoever calls it, and without a traceback it is shown as what was said.
    said = first if isinstance(error, pytest.fail.Exception) else f"{type(error).__name__}: {first}"
    text = shown if shown.startswith(said) else f"{said}\n{shown}"
    return Outcome(at=at, kind="failed", taken=taken, text=_encodable(text))


def _plain_text(item: pytest.Item, error: BaseException) -> str:
    try:
        text = str(item.repr_failure(pytest.ExceptionInfo.from_exception(error)))
    except Exception:  # of a user's exception that cannot be shown
        text = type(error).__name__
    return text


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def taken_along(error: BaseException) -> BaseException:
    """Return `error`, marked as one that another rank is the reason of."""
    with contextlib.suppress(Exception):  # an exception class with slots takes no mark
        setattr(error, _TAKEN, True)
    return error


def _is_taken(error: BaseException) -> bool:
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, LeftTheCall) or hasattr(chain, _TAKEN):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def describe(error: BaseException) -> dict[str, Any]:
    """Return an exception of rank 0's call as plain data."""
    text = _encodable(str(error))
    if isinstance(error, RankFailure):
        return {"type": "RankFailure", "failed": msgspec.to_builtins(error.failed)}
    if isinstance(error, CkptError):
        return {"type": type(error).__name__, "text": text}
    if isinstance(error, pytest.skip.Exception):
        return {"type": "skip", "text": text}
    if isinstance(error, pytest.xfail.Exception):
        return {"type": "xfail", "text": text}
    return {"type": "fail", "text": text or type(error).__name__}


def described(plain: dict[str, Any]) -> BaseException:
    """Return the exception that `describe` told of."""
    if plain["type"] == "RankFailure":
        return RankFailure(msgspec.convert(plain["failed"], list[FailedRank]))
    if plain["type"] == "skip":
        return pytest.skip.Exception(plain["text"])
    if plain["type"] == "xfail":
        return pytest.xfail.Exception(plain["text"])
    if plain["type"] == "fail":
        return pytest.fail.Exception(plain["text"], pytrace=False)
    own = getattr(errors, plain["type"], CkptError)
    return own(plain["text"]) if isinstance(own, type) and issubclass(own, CkptError) else CkptError(plain["text"])
