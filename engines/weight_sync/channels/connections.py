"""Control channels by address: a path for a Unix socket, "tcp://host:port" with a key for TCP.

controls = rlcore.accept_controls("/run/user/1000/weights", 2)       # in the sender's process
control = rlcore.connect_control("/run/user/1000/weights")           # in that of each receiver
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from rlcore.arguments import AT_LEAST_0, BYTES, COUNT, PATH, optional, takes
from rlcore.engines.weight_sync.channels import tcp, unix_socket
from rlcore.engines.weight_sync.channels.control_socket import ControlSocket
from rlcore.errors import InvalidInputError, SyncError

_POLL_S = 0.05
_PROOF_S = 5.0
"""The longest that one who connects by TCP, and may be a stranger, keeps the others waiting."""


@takes("connect_control()", address=PATH, key=optional(BYTES), timeout_s=AT_LEAST_0)
def connect_control(address: str | Path, *, key: bytes | None = None, timeout_s: float = 60.0) -> ControlSocket:
    """Connect to the program that accepts there, or will within ``timeout_s``.

    Args:
        address: a path, or "tcp://host:port".
        key: the other end's, for a TCP address.

    Returns:
        A ``Control``, with ``close()``.

    Raises:
        InvalidInputError: an address of another form, or a key that it does not take.
        SyncError: nobody accepts there, or with another key.
    """
    key = _checked(address, key)
    deadline = time.monotonic() + timeout_s
    while True:
        left = max(_POLL_S, deadline - time.monotonic())
        try:
            if key is None:
                return ControlSocket(unix_socket.connected(address))
            return _proven(tcp.connected(str(address), left), tcp.prove_as_connecting, key, left)
        except tcp.UnprovenError as error:
            raise SyncError(f"the connection to {address} was refused: {error}") from error
        except OSError as error:
            if time.monotonic() >= deadline:
                raise SyncError(f"no weight sender listens at {address} after {timeout_s:g} s: {error}") from error
            time.sleep(_POLL_S)


def _proven(
    connection: socket.socket,
    prove: Callable[[socket.socket, bytes, float], tcp.MessageSeal],
    key: bytes,
    timeout_s: float,
) -> ControlSocket:
    try:
        return ControlSocket(connection, prove(connection, key, timeout_s))
    except BaseException:
        connection.close()
        raise


@takes("accept_controls()", address=PATH, number=COUNT, key=optional(BYTES), timeout_s=AT_LEAST_0)
def accept_controls(
    address: str | Path,
    number: int,
    timeout_s: float = 60.0,
    *,
    key: bytes | None = None,
    are_coming: Callable[[], bool] = lambda: True,
) -> list[ControlSocket]:
    """Listen at an address until ``number`` receivers have connected.

    Args:
        address: a path, which gets a socket that only this user can open; or "tcp://host:port", where this machine
            has the address.
        key: for a TCP address, at least 16 bytes; whoever connects without it is turned away.
        are_coming: called again and again; waiting ends when it returns False.

    Returns:
        A ``Control`` for each receiver, in the order in which they came.

    Raises:
        InvalidInputError: it cannot listen there, or somebody does already; or a key that the address does not take.
        SyncError: fewer have come within ``timeout_s``, or no more will.
    """
    key = _checked(address, key)
    deadline = time.monotonic() + timeout_s
    found: list[ControlSocket] = []
    num_refused = 0
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
                others = f"; {num_refused} others did not know the key" if num_refused else ""
                raise SyncError(
                    f"{len(found)} of {number} receivers have connected to {address}{until}{others}"
                ) from error
            if key is None:
                found.append(ControlSocket(connection))
                continue
            try:
                left = max(_POLL_S, deadline - time.monotonic())
                found.append(_proven(connection, tcp.prove_as_accepting, key, min(left, _PROOF_S)))
            except OSError:  # a stranger, who must not end what others wait for
                num_refused += 1
    return found


def _listening(address: str | Path, number: int) -> AbstractContextManager[socket.socket]:
    return tcp.listening(str(address), number) if _is_tcp(address) else unix_socket.listening(address, number)


def _is_tcp(address: str | Path) -> bool:
    return isinstance(address, str) and address.startswith(tcp.SCHEME)


def _checked(address: str | Path, key: bytes | None) -> bytes | None:
    """Return the key, None for a Unix socket."""
    if _is_tcp(address):
        tcp.host_and_port(str(address))
        return tcp.check_key(str(address), key)
    if key is not None:
        raise InvalidInputError(f"key= is for TCP addresses such as tcp://127.0.0.1:5555; {address} is a path")
    return None
