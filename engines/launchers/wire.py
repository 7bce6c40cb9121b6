"""What a parent and its child say to each other over an inherited socket.

A parent's calls are cloudpickled: a child runs its parent's code anyway, and classes of a script or notebook must
travel. A child's answers are plain data (msgpack) and are never unpickled. Large tensors of both go through shared
memory (``shared.py``).
"""

from __future__ import annotations

import array
import contextlib
import errno
import io
import pickle
import socket
import struct
import threading
import types
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal

import cloudpickle  # type: ignore[import-untyped]
import msgspec
import torch
from torch import Tensor, nn

from rlcore.engines.launchers.shared import Housekeeping, Inbox, Outbox, Parcel
from rlcore.errors import InvalidInputError
from rlcore.tensor_data import dtype_name, host_bytes

Kind = Literal["start", "call", "give up", "close", "end", "result", "event", "error"]
_HEADER = struct.Struct("<QB")  # bytes of the envelope, number of descriptors that ride on it
# A smaller tensor travels inside the message: that is cheaper, and whoever keeps it keeps no segment.
SHARED_BYTES = 64 << 10
_TENSOR, _SMALL_TENSOR, _TUPLE = 1, 2, 3  # msgpack extension codes
_UNCHANGING = (type(None), bool, int, float, str)
_Pickled = MutableMapping[types.FunctionType, bytes | None]
_PICKLED: _Pickled = weakref.WeakKeyDictionary()
_OF_ONE_CALL: ContextVar[_Pickled | None] = ContextVar("_OF_ONE_CALL", default=None)


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
    """One end of the socket. Threads may send while another receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._outbox, self._inbox = Outbox(), Inbox()

    def send(self, kind: Kind, call: int, body: bytes, *, worker: int = 0, tensors: Sequence[Tensor] = ()) -> None:
        """Raises ConnectionError when the other end is gone."""
        with self._sending:
            parcel, descriptors = self._outbox.pack(tensors)
            chores = Housekeeping(self._inbox.released(), self._outbox.dropped())
            envelope = msgspec.msgpack.encode(Envelope(kind, call, worker, body, parcel, chores))
            header = _HEADER.pack(len(envelope), len(descriptors))
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            self._socket.sendmsg([header], ancillary)
            self._socket.sendall(envelope)

    def receive(self) -> tuple[Envelope, list[Tensor]] | None:
        """The next message; None when the other end is gone.

        Raises:
            OSError: this process has no descriptor left for a message's tensors, which are lost.
        """
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

    def give_up(self) -> None:
        """What has arrived can still be received; then both ends find the other gone."""
        with contextlib.suppress(OSError):  # it is already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Only when nothing sends or receives any more."""
        with self._sending:
            self._socket.close()
            self._outbox.close()
            self._inbox.close()

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
    """Leaves out plain tensors, large ones for shared memory and all detached and on the host, and worker handles."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        # By id, and with the object: pickling may make one and drop it, and the next takes its id.
        self._seen: dict[int, tuple[Tensor, tuple[str, int | bytes]]] = {}

    def reducer_override(self, obj: Any) -> Any:
        """cloudpickle looks through all of ``sys.modules`` for each function, which takes milliseconds."""
        if isinstance(obj, types.FunctionType) and (data := _pickled_before(obj)) is not None:
            return pickle.loads, (data,)
        return super().reducer_override(obj)

    def persistent_id(self, obj: Any) -> tuple[str, int | bytes] | None:
        if isinstance(obj, WorkerReference):
            return "worker", obj.number
        if _is_decoding_cache(obj):
            return "none", 0
        if type(obj) is not Tensor or obj.is_meta or obj.layout is not torch.strided:
            return None
        if id(obj) not in self._seen:
            self._seen[id(obj)] = obj, self._left_out(obj.detach().cpu())
        return self._seen[id(obj)][1]

    def _left_out(self, tensor: Tensor) -> tuple[str, int | bytes]:
        if tensor.nbytes < SHARED_BYTES:
            return "small", inlined(tensor)
        self.tensors.append(tensor)
        return "tensor", len(self.tensors) - 1


@contextlib.contextmanager
def one_call() -> Iterator[None]:
    """Functions that several workers are sent within it are pickled once: nothing changes them meanwhile."""
    token = _OF_ONE_CALL.set({})
    try:
        yield
    finally:
        _OF_ONE_CALL.reset(token)


def _pickled_before(function: types.FunctionType) -> bytes | None:
    """Its pickle, to be used again; None if it has to be looked into each time."""
    known = _PICKLED if _is_own_constant(function) else _OF_ONE_CALL.get()
    if known is None:
        return None
    if function not in known:
        known[function] = _pickled_alone(function)
    return known[function]


def _is_own_constant(function: types.FunctionType) -> bool:
    """rlcore made it of plain values, such as ``ppo_clip(clip_low=0.2)``: it never changes."""
    return (
        (function.__module__ or "").startswith("rlcore.")
        and function.__closure__ is not None
        and all(isinstance(cell.cell_contents, _UNCHANGING) for cell in function.__closure__)
    )


def _pickled_alone(function: types.FunctionType) -> bytes | None:
    """None of one that holds a tensor, which travels beside the pickle, or that cannot be pickled."""
    file = io.BytesIO()
    try:
        _AlonePickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(function)
    except Exception:  # of which the pickler of the whole call tells
        return None
    return file.getvalue()


class _AlonePickler(cloudpickle.Pickler):  # type: ignore[misc]
    def persistent_id(self, obj: Any) -> None:
        if isinstance(obj, Tensor | WorkerReference):
            raise pickle.PicklingError(f"{type(obj).__name__}s travel beside the pickle")


def _is_decoding_cache(obj: Any) -> bool:
    """What msgspec leaves in a dataclass that it has decoded; it cannot be pickled, and is made anew."""
    kind = type(obj)
    return kind.__module__ == "msgspec._core" and kind.__name__.endswith("Info")


class _CallUnpickler(pickle.Unpickler):
    def __init__(self, body: bytes, tensors: list[Tensor], workers: Mapping[int, Any]) -> None:
        super().__init__(io.BytesIO(body))
        self._left_out: dict[str, Any] = {"tensor": tensors, "worker": workers, "none": [None]}
        self._small: dict[int, Tensor] = {}

    def persistent_load(self, reference: tuple[str, Any]) -> Any:
        kind, content = reference
        if kind != "small":
            return self._left_out[kind][content]
        if id(content) not in self._small:  # pickle gives the same bytes object where the same was put in
            self._small[id(content)] = from_inlined(content)
        return self._small[id(content)]


def inlined(tensor: Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return msgspec.msgpack.encode((dtype_name(tensor.dtype), tuple(tensor.shape), host_bytes(plain)))


def from_inlined(data: bytes | memoryview) -> Tensor:
    dtype, shape, values = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], bytes])
    flat = torch.frombuffer(bytearray(values), dtype=torch.uint8) if values else torch.empty(0, dtype=torch.uint8)
    # A clone, as torch cannot resize the storage of a buffer that Python owns.
    return flat.view(getattr(torch, dtype)).view(shape).clone()


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


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def dump_answer(value: Any, what: str, *, is_annotated: bool = False) -> tuple[bytes, list[Tensor]]:
    """Plain data and tensors.

    Args:
        is_annotated: ``load_answer`` will be given the type, so that it may hold whatever msgspec can rebuild, such as
            dataclasses; else only what comes back as it was.

    Raises:
        InvalidInputError: what cannot come back; the message names its type.
    """
    writer = _AnswerWriter(is_annotated)
    try:
        return msgspec.msgpack.encode(writer.tagged(value), enc_hook=writer.extension), writer.tensors
    except Exception as error:  # a type, an integer or a depth that msgpack does not have, a device that failed
        raise InvalidInputError(
            f"{what} returned an object that a worker process cannot send back ({error}); "
            "return numbers, strings, lists, tuples, dicts, tensors or None"
        ) from error


class _Tuple:
    """msgpack has none."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items


class _AnswerWriter:
    """Keeps no encoder: the cycle would keep the tensors alive."""

    def __init__(self, is_annotated: bool) -> None:
        self._is_annotated = is_annotated
        self.tensors: list[Tensor] = []

    def tagged(self, value: Any) -> Any:
        """The value with its tuples marked, those inside plain containers too."""
        kind = type(value)
        if kind.__module__ == "numpy" and value.ndim == 0:
            return value.item()
        if kind is tuple:
            return _Tuple([self.tagged(item) for item in value])
        if kind is list:
            return value if _PLAIN.issuperset(map(type, value)) else [self.tagged(item) for item in value]
        if isinstance(value, dict):  # such as a state_dict; it comes back as a dict
            if not _PLAIN.issuperset(map(type, value)):
                raise TypeError(f"a dict whose keys are {', '.join(sorted({type(key).__name__ for key in value}))}")
            return {key: self.tagged(item) for key, item in value.items()}
        if kind in _PLAIN or self._is_annotated or isinstance(value, Tensor):
            return value
        raise TypeError(kind.__name__)

    def extension(self, obj: Any) -> msgspec.msgpack.Ext:
        if type(obj) is _Tuple:
            return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode(obj.items, enc_hook=self.extension))
        if type(obj) not in (Tensor, nn.Parameter) or obj.is_meta or obj.layout is not torch.strided:
            layout = f" of layout {obj.layout} on {obj.device}" if isinstance(obj, Tensor) else ""
            raise TypeError(f"{type(obj).__name__}{layout}")
        tensor = obj.detach().cpu()
        if tensor.nbytes < SHARED_BYTES:
            return msgspec.msgpack.Ext(_SMALL_TENSOR, inlined(tensor))
        self.tensors.append(tensor)
        return msgspec.msgpack.Ext(_TENSOR, len(self.tensors).to_bytes(4, "little"))


class _Extensions:
    """Decodes what msgpack lacks. A class, as a recursive closure would be a cycle that keeps the tensors alive."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def __call__(self, code: int, data: memoryview) -> Any:
        if code == _TENSOR:
            return self._tensors[int.from_bytes(data, "little") - 1]
        if code == _SMALL_TENSOR:
            return from_inlined(data)
        return tuple(msgspec.msgpack.decode(data, ext_hook=self))


def load_answer(body: bytes, tensors: list[Tensor], expected: Any) -> Any:
    """The value, as the type ``expected``; ``Any`` gives what was sent.

    Raises:
        msgspec.ValidationError: it is of another type.
    """
    sent = msgspec.msgpack.decode(body, ext_hook=_Extensions(tensors))
    # In two steps, as a typed decoder takes no extension where it expects a tuple.
    return sent if expected is Any else msgspec.convert(sent, expected, dec_hook=_checked)


def _checked(kind: type, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
