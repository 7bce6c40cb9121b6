"""Unix sockets that only this user can open, for senders and receivers on one machine."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from rlcore.errors import InvalidInputError
from rlcore.process.socket_address import socket_address


def connected(address: str | Path) -> socket.socket:
    """Return a connection to the program that listens at a path; raises OSError if none does."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        with socket_address(address) as path:
            connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def listening(address: str | Path, number: int) -> Iterator[socket.socket]:
    """Listen at a path of the file system, for this user only; the socket goes away at the end.

    Raises:
        InvalidInputError: it cannot listen at the path, or somebody does already.
    """
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
