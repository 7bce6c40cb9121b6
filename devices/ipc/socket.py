"""The socket of an exporter: a file of this user, named after the process, and removed when the process ends."""

from __future__ import annotations

import atexit
import os
import socket
import struct
from pathlib import Path

from rlcore.devices.ipc.messages import peer_of
from rlcore.errors import DeviceError, StateError
from rlcore.process.exporter_socket import own_socket_name, remove_stale_sockets
from rlcore.process.runtime_folder import runtime_folder
from rlcore.process.socket_address import socket_address

_WAITING_CONNECTIONS = 128


def listen() -> tuple[socket.socket, Path]:
    """Return a listening socket of this process in the runtime folder, and its path; remove sockets of ended processes.

    Raises:
        StateError: none can be made there.
    """
    name = own_socket_name()
    with runtime_folder() as folder:
        path = folder.path / name
        remove_stale_sockets(folder)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(folder.address(name))
            folder.limit_to_owner(name)
            listener.listen(_WAITING_CONNECTIONS)
        except OSError as error:
            listener.close()
            raise StateError(
                f"no socket for IPC could be made at {path}: {error}; set RLCORE_RUNTIME to a writable folder"
            ) from error
    atexit.register(_remove, path, os.getpid())
    return listener, path


def connect(path: str, timeout_s: float) -> socket.socket:
    """Return a connection to the exporter at ``path``.

    Raises:
        DeviceError: it has ended, or is another user's.
        TimeoutError: it does not answer.
    """
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise DeviceError(f"process {pid_of(path)}, the exporter, cannot be reached: {error}") from error
    try:
        # With Python's own timeout, connect fails at once if the backlog is full.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_s))
        with socket_address(path) as address:
            connection.connect(address)
        _check_owner(connection, path)
    except BaseException as error:
        connection.close()
        match error:
            case FileNotFoundError() | ConnectionRefusedError():
                raise DeviceError(ended(pid_of(path))) from error
            case BlockingIOError():
                raise TimeoutError from error
            case OSError():
                raise DeviceError(f"process {pid_of(path)}, the exporter, cannot be reached: {error}") from error
        raise
    return connection


def _timeval(seconds: float) -> bytes:
    """Return a struct timeval, at least one microsecond, because 0 means no timeout."""
    whole, part = divmod(max(1, round(seconds * 1_000_000)), 1_000_000)
    return struct.pack("ll", whole, part)


def pid_of(path: str) -> str:
    """Return the id of the process in the name of the socket at ``path``."""
    parts = Path(path).name.split("-")
    return parts[1] if len(parts) == 3 else f"at {path}"


def ended(pid: int | str) -> str:
    return f"process {pid}, the exporter, has ended, or refuses this process's user"


def silent(pid: int | str, timeout_s: float) -> str:
    return f"process {pid}, the exporter, did not answer within {timeout_s:g} s"


def _check_owner(connection: socket.socket, path: str) -> None:
    peer = peer_of(connection)
    if peer.uid != os.getuid():
        raise DeviceError(
            f"the socket {path} belongs to user {peer.uid}; memory is shared only between processes of one user, "
            f"here {os.getuid()}"
        )


def _remove(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child inherits the exit handlers
        path.unlink(missing_ok=True)
