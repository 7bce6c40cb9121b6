"""A control channel over a Unix socket that only this user can open, for senders and receivers on one machine."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rlcore.errors import InvalidInputError, SyncError

_LENGTH = struct.Struct("<Q")
_MOST_BYTES = 1 << 30
_SEND_S = 30.0
_POLL_S = 0.05


class ControlSocket:
    """One end of a connection; a ``Control``."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    def connect(cls, address: str | Path, timeout_s: float = 60.0) -> ControlSocket:
        """To the program that listens there, or will within ``timeout_s``.

        Raises:
            SyncError: nobody does.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(_path(address))
                return cls(connection)
            except OSError as error:
                connection.close()
                if time.monotonic() >= deadline:
                    raise SyncError(f"no weight sender listens at {address} after {timeout_s:g} s: {error}") from error
                time.sleep(_POLL_S)

    def send(self, data: bytes) -> None:
        self._connection.settimeout(_SEND_S)
        self._connection.sendall(_LENGTH.pack(len(data)) + data)

    def recv(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
        if length > _MOST_BYTES:
            raise ConnectionError(f"a message of {length} bytes is announced: the other end is no control channel")
        return bytes(self._exactly(length, deadline))

    def _exactly(self, size: int, deadline: float) -> memoryview:
        found = memoryview(bytearray(size))
        num_read = 0
        while num_read < size:
            self._connection.settimeout(max(1e-3, deadline - time.monotonic()))
            part = self._connection.recv_into(found[num_read:])
            if not part:
                raise ConnectionError("the other end has closed")
            num_read += part
        return found

    def close(self) -> None:
        self._connection.close()


def accept_controls(
    address: str | Path, number: int, timeout_s: float = 60.0, *, are_coming: Callable[[], bool] = lambda: True
) -> list[ControlSocket]:
    """Listen at a path of the file system until ``number`` receivers have connected.

    Args:
        are_coming: asked again and again; waiting ends when it says no.

    Raises:
        InvalidInputError: the path cannot be listened at, or somebody does.
        SyncError: fewer have come within ``timeout_s``, or no more will.
    """
    deadline = time.monotonic() + timeout_s
    found: list[ControlSocket] = []
    with _listening(address, number) as listener:
        while len(found) < number:
            listener.settimeout(_POLL_S)
            try:
                connection, _ = listener.accept()
            except TimeoutError as error:
                if (is_early := time.monotonic() < deadline) and are_coming():
                    continue
                for control in found:
                    control.close()
                until = ", and no more will" if is_early else f" within {timeout_s:g} s"
                raise SyncError(f"{len(found)} of {number} receivers have connected to {address}{until}") from error
            found.append(ControlSocket(connection))
    return found


@contextlib.contextmanager
def _listening(address: str | Path, number: int) -> Iterator[socket.socket]:
    path = _path(address)
    _remove_if_deserted(path)
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(path)
        except OSError as error:
            raise InvalidInputError(f"cannot listen at {address}: {error}") from error
        try:
            os.chmod(path, 0o600)  # nobody can connect before listen()
            listener.listen(number)
            yield listener
        finally:
            os.unlink(path)


def _remove_if_deserted(path: str) -> None:
    """A socket is left behind by a program that was killed."""
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:  # bind says what is wrong
            pass


def _path(address: str | Path) -> str:
    path = os.fspath(address)
    if len(os.fsencode(path)) > 107:
        raise InvalidInputError(f"the address of a Unix socket has at most 107 bytes, got {path!r}; use a shorter path")
    return path
