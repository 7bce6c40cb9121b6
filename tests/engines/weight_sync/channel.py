"""A control channel over a Unix socket, as a framework might write one."""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path
from typing import Self

_LENGTH = struct.Struct("<Q")


class SocketControl:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    def listen(cls, path: Path) -> Self:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{path}.new")
            listener.listen(1)
            Path(f"{path}.new").rename(path)  # who sees it can connect
            listener.settimeout(100)
            connection, _ = listener.accept()
        return cls(connection)

    @classmethod
    def connect(cls, path: Path) -> Self:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        return cls(connection)

    def send(self, data: bytes) -> None:
        self._connection.sendall(_LENGTH.pack(len(data)) + data)

    def recv(self, timeout_s: float) -> bytes:
        self._connection.settimeout(max(0.01, timeout_s))
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return self._exactly(length)

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            part = self._connection.recv(size - len(found))
            if not part:
                raise ConnectionError("the other end has closed")
            found += part
        return found

    def close(self) -> None:
        self._connection.close()


def fill(end: socket.socket) -> None:
    """Send until the other end's buffer takes no more; the socket does not block from then on."""
    end.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            end.send(bytes(1 << 16))


def drain(end: socket.socket) -> None:
    """Receive all that has been sent; the socket does not block from then on."""
    end.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while end.recv(1 << 20):
            pass
