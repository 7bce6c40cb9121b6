"""A control channel over a Unix socket that only this user can open, for senders and receivers on one machine."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rlcore.errors import InvalidInputError, SyncError
from rlcore.process.socket_address import socket_address

_LENGTH = struct.Struct("<Q")
_MOST_BYTES = 1 << 30
_MOST_AT_ONCE = 1 << 20
_SEND_S = 30.0
_POLL_S = 0.05


class ControlSocket:
    """One end of a connection; a ``Control``."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()
        """The part of a message that has not come whole."""

    @classmethod
    def connect(cls, address: str | Path, timeout_s: float = 60.0) -> ControlSocket:
        """Connect to the program that listens there, or will within ``timeout_s``.

        Raises:
            SyncError: nobody listens.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                with socket_address(address) as path:
                    connection.connect(path)
                return cls(connection)
            except OSError as error:
                connection.close()
                if time.monotonic() >= deadline:
                    raise SyncError(f"no weight sender listens at {address} after {timeout_s:g} s: {error}") from error
                time.sleep(_POLL_S)

    def send(self, data: bytes, timeout_s: float = _SEND_S) -> None:
        """Send one message.

        Raises:
            TimeoutError: the other end does not take all of it in time. After a part of it this end closes, because
                the next message would be taken for the rest.
        """
        if self._connection.fileno() < 0:
            raise ConnectionError("this end has closed, perhaps since a message was not taken whole; connect again")
        message = memoryview(_LENGTH.pack(len(data)) + data)
        deadline = time.monotonic() + timeout_s
        num_sent = 0
        try:
            while num_sent < len(message):
                self._connection.settimeout(max(1e-3, deadline - time.monotonic()))
                num_sent += self._connection.send(message[num_sent:])
        except BaseException:
            if num_sent:
                self.close()
            raise

    def recv(self, timeout_s: float) -> bytes:
        """Return the next message. The part that has come when the time is over is kept for the next call."""
        deadline = time.monotonic() + timeout_s
        self._receive(_LENGTH.size, deadline)
        (length,) = _LENGTH.unpack_from(self._received)
        if length > _MOST_BYTES:
            raise ConnectionError(f"a message of {length} bytes is announced: the other end is no control channel")
        self._receive(_LENGTH.size + length, deadline)
        message, self._received = self._received, bytearray()
        return bytes(memoryview(message)[_LENGTH.size :])

    def _receive(self, size: int, deadline: float) -> None:
        """Receive until so many bytes of the message are here."""
        while (missing := size - len(self._received)) > 0:
            self._connection.settimeout(max(1e-3, deadline - time.monotonic()))
            part = self._connection.recv(min(missing, _MOST_AT_ONCE))
            if not part:
                raise ConnectionError("the other end has closed")
            self._received += part

    def close(self) -> None:
        self._connection.close()


def accept_controls(
    address: str | Path, number: int, timeout_s: float = 60.0, *, are_coming: Callable[[], bool] = lambda: True
) -> list[ControlSocket]:
    """Listen at a path of the file system until ``number`` receivers have connected.

    Args:
        are_coming: called again and again; waiting ends when it returns False.

    Raises:
        InvalidInputError: it cannot listen at the path, or somebody does already.
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
    path = Path(address)
    _remove_if_deserted(path)
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            with socket_address(path) as short:
                listener.bind(short)
        except OSError as error:
            raise InvalidInputError(f"cannot listen at {address}: {error}") from error
        try:
            path.chmod(0o600)  # nobody can connect before listen()
            listener.listen(number)
            yield listener
        finally:
            path.unlink()


def _remove_if_deserted(path: Path) -> None:
    """Remove a socket that a killed program has left behind."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            with socket_address(path) as short:
                probe.connect(short)
        except ConnectionRefusedError:
            path.unlink()
        except OSError:  # bind says what is wrong
            pass
