"""What an exception is told as: the cause that DCP hides, and the space where it happened."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from pytest_ckpt.save.failures import describe


def wrapped(**failures: BaseException) -> CheckpointException:
    return CheckpointException("write", {int(rank[1:]): _wrap_exception(error) for rank, error in failures.items()})


def test_cause_is_that_of_the_ranks_it_began_in() -> None:
    described = describe(wrapped(r2=ValueError("two\nlines"), r0=ValueError("two\nlines")))
    assert described["cause"] == "ValueError: two"
    assert described["origins"] == [0, 2]
    assert "(RANK 2)" in described["traceback"]
    assert described["hints"] == []


def test_error_without_a_message_still_has_a_cause() -> None:
    assert describe(AssertionError())["cause"] == "AssertionError: no message"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_write_that_the_storage_refused_is_told_with_its_errno(number: int) -> None:
    inner = OSError(number, os.strerror(number))
    outer = RuntimeError("wrapped by a writer")
    outer.__cause__ = inner
    for error in (inner, outer, wrapped(r1=inner)):
        (hint,) = describe(error)["hints"]
        assert hint == f"target full or write failed: {errno.errorcode[number]} {os.strerror(number)}"


@pytest.mark.parametrize(
    "message",
    [
        "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598",
        "PytorchStreamWriter failed writing file data/0: file write failed",
    ],
)
def test_torchs_words_for_a_short_write_are_translated(message: str) -> None:
    (hint,) = describe(wrapped(r1=RuntimeError(message)))["hints"]
    assert hint.startswith("target full or write failed: ")


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer", True),
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:51388", True),
        ("the tensor has no peer", False),
    ],
)
def test_error_that_only_says_that_a_peer_is_gone_is_known(message: str, lost: bool) -> None:
    assert describe(RuntimeError(message))["lost_peer"] is lost


def test_space_is_told_with_what_was_written_there(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "shard").write_bytes(bytes(2_000_000))
    location = str(tmp_path / "save")
    (hint,) = describe(ValueError("a bug"), location, 1000)["hints"]
    assert hint.startswith(f"{location}: 2.00 MB written there, ")
    assert hint.endswith(" free")
    _, space = describe(OSError(errno.ENOSPC, "full"), location, 1000)["hints"]
    assert "free space is plenty for a state of 1.00 kB, so a quota, a limit" in space
    _, space = describe(OSError(errno.ENOSPC, "full"), location, 10**18)["hints"]
    assert "plenty" not in space
    _, space = describe(OSError(errno.ENOSPC, "full"), location)["hints"]
    assert "plenty" not in space, "what was needed is not known"


def test_place_that_was_never_made_has_nothing_written(tmp_path: Path) -> None:
    (hint,) = describe(ValueError(), str(tmp_path / "not" / "there"))["hints"]
    assert ": 0 B written there, " in hint


def test_url_has_no_free_space() -> None:
    assert describe(ValueError(), "s3://bucket/key")["hints"] == []
