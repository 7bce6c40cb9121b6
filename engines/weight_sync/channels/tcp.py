"""TCP connections between two programs that know a key, for senders and receivers that share no folder.

Each end proves that it knows the key before the other reads anything else from it, and every message then carries a
tag that no other message of any connection has. What is sent can be read on the way, but not changed, repeated, left
out or made by others.

    accepting end -> connecting end    greeting, nonce
    connecting end -> accepting end    nonce, HMAC-SHA256(key, "connecting" + nonces)
    accepting end -> connecting end    HMAC-SHA256(key, "accepting" + nonces)
    message number n                   length, data, HMAC-SHA256(HMAC-SHA256(key, "messages" + nonces), end + n + data)
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from rlcore.errors import InvalidInputError

SCHEME = "tcp://"
_SHORTEST_KEY = 16
_GREETING = b"rlcore.control/1"
_NONCE_BYTES = _TAG_BYTES = 32
_NUMBER = struct.Struct("<Q")
_PROBE_S = 2
_SILENT_S = 10
"""A host that answers nothing for so long is gone. The kernel answers for a process that computes, or is stopped."""


class MessageSeal:
    """The tags of the messages of one connection."""

    size = _TAG_BYTES

    def __init__(self, key: bytes, own: bytes, other: bytes) -> None:
        self._key, self._own, self._other = key, own, other
        self._num_sent = self._num_received = 0

    def tag(self, data: bytes) -> bytes:
        return _hmac(self._key, self._own, _NUMBER.pack(self._num_sent), data)

    def sent(self) -> None:
        self._num_sent += 1

    def check(self, data: bytes, tag: bytes) -> None:
        if not hmac.compare_digest(tag, _hmac(self._key, self._other, _NUMBER.pack(self._num_received), data)):
            raise ConnectionError("a message was changed, repeated or left out on the way; connect again")
        self._num_received += 1


class UnprovenError(ConnectionError):
    """The other end does not know the key, or speaks another protocol."""


def check_key(address: str, key: bytes | None) -> bytes:
    """Return the key of a TCP address; raises InvalidInputError for none, or one that can be guessed."""
    if not isinstance(key, bytes) or len(key) < _SHORTEST_KEY:
        got = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise InvalidInputError(
            f"{address} can be reached by others, so it takes key=, at least {_SHORTEST_KEY} bytes that both ends "
            f"know, such as of secrets.token_bytes(32); got {got}"
        )
    return key


def host_and_port(address: str) -> tuple[str, int]:
    """Return the two parts of "tcp://host:port"; raises InvalidInputError if it is something else."""
    with contextlib.suppress(ValueError):  # of a port that is no number, or too large
        parts = urlsplit(address)
        if parts.hostname and parts.port and parts.netloc == address.removeprefix(SCHEME) and not parts.username:
            return parts.hostname, parts.port
    raise InvalidInputError(f"a TCP address is tcp://host:port, such as tcp://127.0.0.1:5555; got {address!r}")


def connected(address: str, timeout_s: float) -> socket.socket:
    """Return a connection to the program that listens there; raises OSError if none does."""
    connection = socket.create_connection(host_and_port(address), timeout=timeout_s)
    prepare(connection)
    return connection


def prepare(connection: socket.socket) -> None:
    """Have small messages leave at once, and a host that does not answer any more be noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT_S)


@contextlib.contextmanager
def listening(address: str, number: int) -> Iterator[socket.socket]:
    """Listen at the address alone.

    Raises:
        InvalidInputError: this machine has no such address, or somebody listens there already.
    """
    host, port = host_and_port(address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=number)
    except OSError as error:
        raise InvalidInputError(f"cannot listen at {address}: {error}") from error
    with listener:
        yield listener


def prove_as_accepting(connection: socket.socket, key: bytes, timeout_s: float) -> MessageSeal:
    """Exchange proofs with a program that has connected.

    Raises:
        OSError: it does not know the key, has gone, or takes longer than ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    prepare(connection)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.settimeout(timeout_s)
    connection.sendall(_GREETING + nonce)
    answer = _exactly(connection, _NONCE_BYTES + _TAG_BYTES, deadline)
    nonces = nonce + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _hmac(key, b"connecting", nonces)):
        raise UnprovenError("what connected does not know the key")
    connection.sendall(_hmac(key, b"accepting", nonces))
    return MessageSeal(_hmac(key, b"messages", nonces), b"accepting", b"connecting")


def prove_as_connecting(connection: socket.socket, key: bytes, timeout_s: float) -> MessageSeal:
    """Exchange proofs with the program that accepted the connection; raises as ``prove_as_accepting``."""
    deadline = time.monotonic() + timeout_s
    greeting = _exactly(connection, len(_GREETING) + _NONCE_BYTES, deadline)
    if not greeting.startswith(_GREETING):
        raise UnprovenError("what listens there is no weight sender of this version of rlcore")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    nonces = greeting[len(_GREETING) :] + nonce
    connection.sendall(nonce + _hmac(key, b"connecting", nonces))
    try:
        proof = _exactly(connection, _TAG_BYTES, deadline)
    except ConnectionError as error:
        raise UnprovenError("what listens there has another key, or has ended") from error
    if not hmac.compare_digest(proof, _hmac(key, b"accepting", nonces)):
        raise UnprovenError("what listens there does not know the key")
    return MessageSeal(_hmac(key, b"messages", nonces), b"connecting", b"accepting")


def _hmac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def _exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    found = b""
    while len(found) < size:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        part = connection.recv(size - len(found))
        if not part:
            raise ConnectionError("the other end has closed")
        found += part
    return found
