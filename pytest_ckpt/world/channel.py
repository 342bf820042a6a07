"""The command channel between a world and one of its ranks: plain data in, plain data out."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import Any

import msgspec

_LENGTH = struct.Struct("!Q")


def encode(message: Any) -> bytes:
    """Return plain data as it crosses a channel; `TypeError` names what is not plain."""
    try:
        return msgspec.msgpack.encode(message)
    except TypeError:
        raise
    except (OverflowError, RecursionError, ValueError) as error:  # 2**70, a list in itself, a lone surrogate
        raise TypeError(f"not plain data: {error}") from error


class Channel:
    """One end of a Unix stream socket that carries msgpack messages, so that no object and no code crosses.

    Every transfer can have a deadline: a rank that is stopped in the middle of a message must not hold its world.
    """

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream

    @classmethod
    def connect(cls, path: str) -> Channel:
        """Return the rank's end, connected to the world that listens at `path`."""
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.connect(path)
        return cls(stream)

    def fileno(self) -> int:
        """Return the descriptor, for `multiprocessing.connection.wait`."""
        return self._stream.fileno()

    def send(self, message: Any, timeout_s: float | None = None) -> None:
        """Send plain data; `TypeError`, before anything is sent, where it is none; `OSError` where nobody takes it."""
        self.send_encoded(encode(message), timeout_s)

    def send_encoded(self, data: bytes, timeout_s: float | None = None) -> None:
        """Send what `encode` returned."""
        self._stream.settimeout(timeout_s)
        self._stream.sendall(_LENGTH.pack(len(data)))
        self._stream.sendall(data)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message; `EOFError` when the other end is gone, `TimeoutError` past `timeout_s` seconds."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        return msgspec.msgpack.decode(self._read(length, deadline))

    def shut_down(self) -> None:
        """End the stream: what arrived can still be received, then comes `EOFError`, whoever holds the other end."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self._stream.close()

    def _read(self, length: int, deadline: float | None) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            self._stream.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
            try:
                count = self._stream.recv_into(view)
            except ConnectionResetError as error:
                raise EOFError from error
            if count == 0:
                raise EOFError
            view = view[count:]
        return data


class Listener:
    """The world's side: waits for its ranks with a deadline."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(path)
        self._socket.listen(128)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()

    def accept(self, timeout_s: float) -> Channel | None:
        """Return the next rank's channel, or None when none came within `timeout_s` seconds."""
        self._socket.settimeout(timeout_s)
        try:
            accepted, _ = self._socket.accept()
        except TimeoutError:
            return None
        return Channel(accepted)
