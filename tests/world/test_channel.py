"""The command channel: plain data, whole messages, deadlines."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_ckpt.world.channel import Channel, Listener, encode

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=20,
)


@pytest.fixture
def ends() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return Channel(one), Channel(other)


@given(message=plain)
def test_plain_data_arrives_as_it_was_sent(message: Any) -> None:
    one, other = socket.socketpair()
    with one, other:
        Channel(one).send(message, 10)
        assert Channel(other).receive(10) == message


def test_messages_of_ten_megabytes_arrive_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    messages = ["x" * 10_000_000, b"y" * 10_000_000, "z"]

    def send() -> None:
        for message in messages:
            ends[0].send(message, 60)

    thread = threading.Thread(target=send)
    thread.start()
    assert [ends[1].receive(60) for _ in messages] == messages
    thread.join(10)


def test_end_of_the_other_side_is_eof_also_in_the_middle_of_a_message() -> None:
    for sent in (b"", b"\x00" * 3, b"\x00" * 7 + b"\x09" + b"four"):
        one, other = socket.socketpair()
        one.sendall(sent)
        one.close()
        with pytest.raises(EOFError):
            Channel(other).receive(10)


def test_message_that_stops_in_its_middle_ends_at_the_deadline() -> None:
    one, other = socket.socketpair()
    one.sendall(b"\x00" * 7 + b"\x09" + b"four")
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        Channel(other).receive(0.2)
    assert time.monotonic() - began < 5


def test_message_that_nobody_takes_ends_at_the_deadline(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(TimeoutError):
        ends[0].send("x" * 10_000_000, 0.2)


def test_shut_down_channel_still_gives_what_had_arrived(ends: tuple[Channel, Channel]) -> None:
    ends[0].send("last words")
    ends[1].shut_down()
    assert ends[1].receive(10) == "last words"
    with pytest.raises(EOFError):
        ends[1].receive(10)


endless: list[Any] = []
endless.append(endless)


@pytest.mark.parametrize("message", [object(), {"a": {1: object}}, 2**64, endless, "\ud800", len], ids=str)
def test_what_is_not_plain_is_refused_before_anything_is_sent(ends: tuple[Channel, Channel], message: object) -> None:
    with pytest.raises(TypeError):
        encode(message)
    with pytest.raises(TypeError):
        ends[0].send(message)
    ends[0].send("next")
    assert ends[1].receive(10) == "next"


def test_listener_waits_for_its_ranks_with_a_deadline(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with Listener(path) as listener:
        assert listener.accept(0.05) is None
        rank = Channel.connect(path)
        world = listener.accept(10)
        assert world is not None
        world.send({"hello": 1})
        assert rank.receive(10) == {"hello": 1}
    with pytest.raises(ConnectionRefusedError):
        Channel.connect(path)
