"""Messages with tensors between a process and its child, over a socket that the child inherits."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec
from torch import Tensor

from rlcore import held_memory
from rlcore.decoding import decode
from rlcore.errors import InvalidInputError
from rlcore.process.shared_tensors import SegmentNotice, SharedTensorReceiver, SharedTensors, SharedTensorSender

_HEADER = struct.Struct("<QB")  # bytes of the envelope, number of descriptors that come with it
H = TypeVar("H")


class Envelope(msgspec.Struct, Generic[H], array_like=True):
    """One message as it travels."""

    head: H
    body: bytes
    shared: SharedTensors | None
    notice: SegmentNotice


class TensorChannel(Generic[H]):
    """One end of the socket. Several threads may send while one receives.

    A message is a head of a type that msgspec decodes, a body of bytes, and tensors in host memory.
    """

    def __init__(self, connection: socket.socket, head: type[H]) -> None:
        self._socket = connection
        self._type = Envelope[head]  # type: ignore[valid-type]
        self._sending = threading.Lock()
        self._sender, self._receiver = SharedTensorSender(), SharedTensorReceiver()
        held_memory.report(self, lambda channel: {"tensors of calls, shared between two processes": channel.num_bytes})

    @property
    def num_bytes(self) -> int:
        """The size of the shared memory of both directions."""
        return self._sender.num_bytes + self._receiver.num_bytes

    def send(self, head: H, body: bytes = b"", tensors: Sequence[Tensor] = ()) -> None:
        """Raise ConnectionError when the other end is gone."""
        with self._sending:
            shared, descriptors = self._sender.pack(tensors)
            notice = SegmentNotice(self._receiver.unused(), self._sender.freed())
            envelope = msgspec.msgpack.encode(Envelope(head, body, shared, notice))
            header = _HEADER.pack(len(envelope), len(descriptors))
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            self._socket.sendmsg([header], ancillary)
            self._socket.sendall(envelope)

    def receive(self) -> tuple[H, bytes, list[Tensor]] | None:
        """Return head, body and tensors of the next message; None when the other end is gone.

        Raises:
            OSError: this process has no descriptor left for a message's tensors, which are lost.
            InvalidInputError: what comes is no message. The channel is of no use any more.
        """
        descriptors: list[int] = []
        try:
            header, descriptors = self._header()
            if len(header) < _HEADER.size:
                return None
            data = self._exactly(_HEADER.unpack(header)[0])
            envelope: Envelope[H] = decode(data, self._type, "message", error=InvalidInputError)
            return envelope.head, envelope.body, self._tensors(envelope, descriptors)
        except (ConnectionError, EOFError):
            return None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _tensors(self, envelope: Envelope[H], descriptors: list[int]) -> list[Tensor]:
        try:
            tensors = self._receiver.unpack(envelope.shared, descriptors)
            self._receiver.unmap(envelope.notice.freed)
            self._sender.reuse(envelope.notice.unused)
        except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidInputError(
                f"a message tells of shared memory that is not there: {type(error).__name__}: {error}"
            ) from error
        return tensors

    def shut_down(self) -> None:
        """End the connection: both ends can receive what has come already, then find the other end gone."""
        with contextlib.suppress(OSError):  # it is already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free everything; only when nothing sends or receives any more."""
        with self._sending:
            self._socket.close()
            self._sender.close()
            self._receiver.close()

    def _header(self) -> tuple[bytes, list[int]]:
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        header, ancillary, flags, _ = self._socket.recvmsg(_HEADER.size, room, socket.MSG_CMSG_CLOEXEC)
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "no file descriptor is left for a tensor; raise the limit (ulimit -n)")
        descriptors = array.array("i")
        for _, _, data in ancillary:
            descriptors.frombytes(data)
        while 0 < len(header) < _HEADER.size:
            header += self._exactly(_HEADER.size - len(header))
        return header, list(descriptors)

    def _exactly(self, nbytes: int) -> bytearray:
        try:
            data = bytearray(nbytes)
        except (MemoryError, OverflowError) as error:
            raise InvalidInputError(
                f"a message of {nbytes} bytes is announced, for which there is no memory"
            ) from error
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return data
