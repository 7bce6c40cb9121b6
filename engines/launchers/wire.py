"""What a parent and its child say to each other over an inherited socket.

A parent's calls are cloudpickled: a child runs its parent's code anyway, and classes of a script or notebook must
travel. A child's answers are plain data (msgpack) and are never unpickled. Large tensors of both go through shared
memory (``shared.py``).
"""

from __future__ import annotations

import array
import io
import pickle
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import cloudpickle  # type: ignore[import-untyped]
import msgspec
import torch
from torch import Tensor

from rlcore.engines.launchers.shared import Housekeeping, Inbox, Outbox, Parcel
from rlcore.errors import InvalidInputError

Kind = Literal["start", "call", "end", "result", "event", "error"]
_HEADER = struct.Struct("<QB")  # bytes of the envelope, number of descriptors that ride on it
_SHARED_BYTES = 64 << 10  # below this a copy inside the message is cheaper than a segment
_TENSOR, _TUPLE = 1, 2  # msgpack extension codes


class Envelope(msgspec.Struct, array_like=True):
    """One message."""

    kind: Kind
    call: int
    """Which call it belongs to."""
    worker: int
    """Which of the child's workers is called."""
    body: bytes
    parcel: Parcel | None
    housekeeping: Housekeeping


class Channel:
    """One end of the socket. One thread may send while another receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._outbox, self._inbox = Outbox(), Inbox()

    def send(self, kind: Kind, call: int, body: bytes, *, worker: int = 0, tensors: Sequence[Tensor] = ()) -> None:
        """Raises OSError when the other end is gone."""
        parcel, descriptors = self._outbox.pack(tensors)
        chores = Housekeeping(self._inbox.released(), self._outbox.dropped())
        envelope = msgspec.msgpack.encode(Envelope(kind, call, worker, body, parcel, chores))
        header = _HEADER.pack(len(envelope), len(descriptors))
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self._socket.sendmsg([header], ancillary)
        self._socket.sendall(envelope)

    def receive(self) -> tuple[Envelope, list[Tensor]] | None:
        """The next message; None when the other end is gone."""
        try:
            header, descriptors = self._header()
            if len(header) < _HEADER.size:
                return None
            envelope = msgspec.msgpack.decode(self._exactly(_HEADER.unpack(header)[0]), type=Envelope)
        except (ConnectionError, EOFError):
            return None
        tensors = self._inbox.unpack(envelope.parcel, descriptors)
        self._inbox.dropped(envelope.housekeeping.dropped)
        self._outbox.released(envelope.housekeeping.released)
        return envelope, tensors

    def close(self) -> None:
        self._socket.close()
        self._outbox.close()

    def _header(self) -> tuple[bytes, list[int]]:
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        header, ancillary, _, _ = self._socket.recvmsg(_HEADER.size, room, socket.MSG_CMSG_CLOEXEC)
        descriptors = array.array("i")
        for _, _, data in ancillary:
            descriptors.frombytes(data)
        while 0 < len(header) < _HEADER.size:
            header += self._exactly(_HEADER.size - len(header))
        return header, list(descriptors)

    def _exactly(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return data


# ---------------------------------------------------------------------------------- parent to child: calls


class WorkerReference:
    """A worker of the receiving process, by number."""

    def __init__(self, number: int) -> None:
        self.number = number


class _CallPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves out tensors, large ones for shared memory and all on the host, and worker handles."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._seen: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        if isinstance(obj, WorkerReference):
            return "worker", obj.number
        if type(obj) is not Tensor or obj.is_meta or obj.layout is not torch.strided:
            return None
        if obj.nbytes < _SHARED_BYTES and obj.device.type == "cpu":
            return None
        if id(obj) not in self._seen:
            self._seen[id(obj)] = len(self.tensors)
            self.tensors.append(obj.detach().cpu())
        return "tensor", self._seen[id(obj)]


class _CallUnpickler(pickle.Unpickler):
    def __init__(self, body: bytes, tensors: list[Tensor], workers: Mapping[int, Any]) -> None:
        super().__init__(io.BytesIO(body))
        self._left_out: dict[str, Any] = {"tensor": tensors, "worker": workers}

    def persistent_load(self, reference: tuple[str, int]) -> Any:
        kind, number = reference
        return self._left_out[kind][number]


def dump_call(call: Any) -> tuple[bytes, list[Tensor]]:
    """Anything a parent gives its child. Device tensors arrive on the host."""
    file = io.BytesIO()
    pickler = _CallPickler(file)
    try:
        pickler.dump(call)
    except Exception as error:  # whatever a user's object raises when it is pickled
        raise InvalidInputError(f"an argument cannot be sent to a worker process: {error}") from error
    return file.getvalue(), pickler.tensors


def load_call(body: bytes, tensors: list[Tensor], workers: Mapping[int, Any]) -> Any:
    """Only a child calls this, only on its inherited socket."""
    return _CallUnpickler(body, tensors, workers).load()


# -------------------------------------------------------------------------------- child to parent: answers


def dump_answer(value: Any, what: str) -> tuple[bytes, list[Tensor]]:
    """Plain data, rlcore's own dataclasses, and tensors."""
    tensors: list[Tensor] = []

    def extend(obj: Any) -> msgspec.msgpack.Ext:
        if isinstance(obj, Tensor):
            tensors.append(obj.detach().cpu())
            return msgspec.msgpack.Ext(_TENSOR, len(tensors).to_bytes(4, "little"))
        raise TypeError(f"{type(obj).__name__}")

    encoder = msgspec.msgpack.Encoder(enc_hook=extend)
    try:
        return encoder.encode(_tag_tuples(value, encoder)), tensors
    except TypeError as error:
        raise InvalidInputError(
            f"{what} returned an object that a worker process cannot send back ({error}); "
            "return numbers, strings, lists, tuples, dicts, tensors or None"
        ) from error


class _Extensions:
    """Decodes what msgpack lacks. A class, as a recursive closure would be a cycle that keeps the tensors alive."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def __call__(self, code: int, data: memoryview) -> Any:
        if code == _TENSOR:
            return self._tensors[int.from_bytes(data, "little") - 1]
        return tuple(msgspec.msgpack.decode(data, ext_hook=self))


def load_answer(body: bytes, tensors: list[Tensor], expected: Any) -> Any:
    """The value, as the type ``expected``; ``Any`` gives what was sent."""
    return msgspec.msgpack.decode(body, type=expected, ext_hook=_Extensions(tensors), dec_hook=_checked)


def _checked(kind: type, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")


def _tag_tuples(value: Any, encoder: msgspec.msgpack.Encoder) -> Any:
    """msgpack has no tuples: mark those in plain containers. Dataclasses are decoded by their annotations."""
    if isinstance(value, tuple):
        return msgspec.msgpack.Ext(_TUPLE, encoder.encode([_tag_tuples(item, encoder) for item in value]))
    if isinstance(value, list):
        return [_tag_tuples(item, encoder) for item in value] if _has_containers(value) else value
    if isinstance(value, dict):
        return {key: _tag_tuples(item, encoder) for key, item in value.items()}
    return value


def _has_containers(values: list[Any]) -> bool:
    return any(isinstance(item, tuple | list | dict) for item in values)
