"""A control channel over a connected stream socket, of whatever family."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import time
from collections.abc import Iterator
from typing import Protocol

_LENGTH = struct.Struct("<Q")
_MOST_BYTES = 1 << 30
_MOST_AT_ONCE = 1 << 20
_SEND_S = 30.0


class Seal(Protocol):
    """Tags that tell each message of a connection from every other message."""

    size: int
    """The bytes of a tag."""

    def tag(self, data: bytes) -> bytes:
        """Return the tag of the next message that is sent; the same until ``sent``."""

    def sent(self) -> None:
        """Record that the message has gone."""

    def check(self, data: bytes, tag: bytes) -> None:
        """Raise ConnectionError unless the tag is that of the next message that is received."""


class ControlSocket:
    """One end of a connection; a ``Control``. Each message follows its length, with its tag if there is a seal."""

    def __init__(self, connection: socket.socket, seal: Seal | None = None) -> None:
        self._connection = connection
        self._seal = seal
        self._received = bytearray()
        """The part of a message that has not come whole."""

    @property
    def own_address(self) -> str:
        """The address of this host by which the other end reaches it; "" where both are on one host by a path."""
        if self._connection.family == socket.AF_UNIX:
            return ""
        with contextlib.suppress(OSError):  # it is closed
            return str(self._connection.getsockname()[0])
        return ""

    def send(self, data: bytes, timeout_s: float = _SEND_S) -> None:
        """Send one message.

        Raises:
            TimeoutError: the other end does not take all of it in time. After a part of it this end closes, because
                the next message would be taken for the rest.
        """
        if self._connection.fileno() < 0:
            raise ConnectionError("this end has closed, perhaps since a message was not taken whole; connect again")
        tag = self._seal.tag(data) if self._seal else b""
        message = memoryview(_LENGTH.pack(len(data)) + data + tag)
        deadline = time.monotonic() + timeout_s
        num_sent = 0
        try:
            while num_sent < len(message):
                self._connection.settimeout(max(1e-3, deadline - time.monotonic()))
                num_sent += self._sent(message[num_sent:])
        except BaseException:
            if num_sent:
                self.close()
            raise
        if self._seal:
            self._seal.sent()

    def recv(self, timeout_s: float) -> bytes:
        """Return the next message. The part that has come when the time is over is kept for the next call."""
        deadline = time.monotonic() + timeout_s
        self._receive(_LENGTH.size, deadline)
        (length,) = _LENGTH.unpack_from(self._received)
        if length > _MOST_BYTES:
            raise ConnectionError(f"a message of {length} bytes is announced: the other end is no control channel")
        end = _LENGTH.size + length
        self._receive(end + (self._seal.size if self._seal else 0), deadline)
        received, self._received = memoryview(self._received), bytearray()
        message = bytes(received[_LENGTH.size : end])
        if self._seal:
            self._seal.check(message, bytes(received[end:]))
        return message

    def _receive(self, size: int, deadline: float) -> None:
        """Receive until so many bytes of the message are here."""
        while (missing := size - len(self._received)) > 0:
            self._connection.settimeout(max(1e-3, deadline - time.monotonic()))
            part = self._part(min(missing, _MOST_AT_ONCE))
            if not part:
                raise ConnectionError("the other end has closed")
            self._received += part

    def _sent(self, data: memoryview) -> int:
        with _told_from_timeout():
            return self._connection.send(data)

    def _part(self, size: int) -> bytes:
        with _told_from_timeout():
            return self._connection.recv(size)

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def _told_from_timeout() -> Iterator[None]:
    """Tell the kernel's error, that the other host is silent, from the TimeoutError of ``settimeout``."""
    try:
        yield
    except TimeoutError as error:
        if error.errno == errno.ETIMEDOUT:
            raise ConnectionError("its host does not answer any more, or the network to it is cut") from error
        raise
