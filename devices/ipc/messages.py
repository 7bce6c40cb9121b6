"""The messages of an exporter and its importers over a Unix socket.

A message is one packet (SOCK_SEQPACKET) of msgpack, with at most one file descriptor. Nothing is unpickled.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Any, NamedTuple

import msgspec

from rlcore.decoding import decode
from rlcore.errors import DeviceError

_LARGEST = 1 << 16
_PEER = struct.Struct("3i")


class Claim(msgspec.Struct, frozen=True, tag=True):
    """Request of an importer to open an export. The exporter compares these fields of the handle with its ledger."""

    request: int
    """The importer's number of this request, which the answer repeats."""
    export_id: str
    device_uuid: str
    payload: bytes
    storage_bytes: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """Notice of an importer that one of its claims has ended: it no longer uses the memory for it."""

    export_id: str


class Granted(msgspec.Struct, frozen=True, tag=True):
    """Consent of the exporter to a claim. The packet carries a descriptor if the memory has one."""

    request: int
    export_id: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Refusal of a claim by the exporter, with the reason."""

    request: int
    reason: str


class Revoke(msgspec.Struct, frozen=True, tag=True):
    """Request of the exporter to close all mappings of an export, and to send Release for each claim."""

    export_id: str


Message = Claim | Release | Granted | Refused | Revoke
_KIND: Any = Message  # a union of types is no type


class PeerCredentials(NamedTuple):
    """The process at the other end of a socket, by the kernel's SO_PEERCRED."""

    pid: int
    """0 if that process is in another PID namespace."""
    uid: int


def peer_of(connection: socket.socket) -> PeerCredentials:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _ = _PEER.unpack(credentials)
    return PeerCredentials(pid, uid)


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def receive(connection: socket.socket) -> tuple[Message, int | None] | None:
    """Return the next message and its descriptor, which the caller closes; None when the other end is gone.

    Raises:
        DeviceError: the packet is not a message.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, _LARGEST, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError:  # connection reset: the peer ended before it read everything
        return None
    if not data:
        return None
    try:
        sender = f"process {peer_of(connection).pid}"
        message: Message = decode(data, _KIND, f"IPC message of {sender}", error=DeviceError)
    except DeviceError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return message, descriptors[0] if descriptors else None
