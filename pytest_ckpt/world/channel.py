"""The command channel between a world and one of its ranks: plain data in, plain data out."""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection
from typing import Any

import msgspec


class Channel:
    """One end of a Unix stream socket that carries msgpack messages, so that no object and no code crosses."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self.connection = connection

    @classmethod
    def connect(cls, path: str) -> Channel:
        """Return the rank's end, connected to the world that listens at `path`."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.connect(path)
        return cls(Connection(client.detach()))

    def send(self, message: Any) -> None:
        """Send plain data; `TypeError` names what is not plain, before anything is sent."""
        self.connection.send_bytes(msgspec.msgpack.encode(message))

    def receive(self) -> Any:
        """Return the next message; `EOFError` when the other end is gone."""
        try:
            return msgspec.msgpack.decode(self.connection.recv_bytes())
        except ConnectionResetError as error:
            raise EOFError from error

    def close(self) -> None:
        """Close this end."""
        self.connection.close()


class Listener:
    """The world's side: waits for its ranks with a deadline."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(path)
        self._socket.listen(128)

    def accept(self, timeout_s: float) -> Channel | None:
        """Return the next rank's channel, or None when none came within `timeout_s` seconds."""
        self._socket.settimeout(timeout_s)
        try:
            accepted, _ = self._socket.accept()
        except TimeoutError:
            return None
        accepted.setblocking(True)
        return Channel(Connection(accepted.detach()))

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
