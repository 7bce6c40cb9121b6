"""What an exporter and its importers say to each other over their Unix socket.

One message is one packet (SOCK_SEQPACKET), msgpack, with at most one file descriptor beside it. Nothing is unpickled.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

import msgspec

from rlcore.errors import DeviceError

_LARGEST = 1 << 16
_PEER = struct.Struct("3i")


class Claim(msgspec.Struct, frozen=True, tag=True):
    """Importer: let me open this export. What its handle says of it is compared with the ledger."""

    request: int
    """The importer's number, which the answer repeats."""
    export_id: str
    device_uuid: str
    payload: bytes
    storage_bytes: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """Importer: one claim of mine has ended; I no longer touch the memory for it."""

    export_id: str


class Granted(msgspec.Struct, frozen=True, tag=True):
    """Exporter: open it. A descriptor comes along where the memory has one."""

    request: int
    export_id: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Exporter: it cannot be opened; why."""

    request: int
    reason: str


class Revoke(msgspec.Struct, frozen=True, tag=True):
    """Exporter: let go of it, then send Release."""

    export_id: str


Message = Claim | Release | Granted | Refused | Revoke
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class PeerCredentials(NamedTuple):
    """The process at the other end of a socket, as the kernel knows it."""

    pid: int
    """0 if this process cannot see it: it is in another PID namespace."""
    uid: int


def peer_of(connection: socket.socket) -> PeerCredentials:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _ = _PEER.unpack(credentials)
    return PeerCredentials(pid, uid)


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def receive(connection: socket.socket) -> tuple[Message, int | None] | None:
    """The next message and its descriptor, which the caller closes; None when the other end is gone.

    Raises:
        DeviceError: the packet is no message.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, _LARGEST, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError:  # reset: it ended without reading all we sent
        return None
    if not data:
        return None
    try:
        return _decoder.decode(data), descriptors[0] if descriptors else None
    except msgspec.MsgspecError as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise DeviceError(f"process {peer_of(connection).pid} sent no IPC message: {error}") from error
