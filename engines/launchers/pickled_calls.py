"""Calls as pickles, for a worker process that runs its parent's code: functions and classes of a script travel too."""

from __future__ import annotations

import contextlib
import io
import pickle
import types
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import Tensor

from rlcore.engines.launchers.messages import WorkerReference
from rlcore.errors import InvalidInputError
from rlcore.tensor_tree import INLINE_BYTES, tensor_from_bytes, tensor_to_bytes

_IMMUTABLE = (type(None), bool, int, float, str)
_Pickles = MutableMapping[types.FunctionType, bytes | None]
_PICKLES: _Pickles = weakref.WeakKeyDictionary()


class _OneCall:
    """Holds what was pickled for the first of several workers that are sent one call."""

    def __init__(self) -> None:
        self.functions: _Pickles = {}
        self.calls: dict[object, tuple[object, tuple[bytes, list[Tensor]]]] = {}


_ONE_CALL: ContextVar[_OneCall | None] = ContextVar("_ONE_CALL", default=None)


def dump_pickled_call(call: tuple[object, ...]) -> tuple[bytes, list[Tensor]]:
    """Return the pickle of a call, and the tensors that were left out; device tensors arrive on the host.

    Within ``one_call`` equal arguments are pickled, and brought to the host, once.

    Raises:
        InvalidInputError: an argument cannot be pickled.
    """
    if (of_all := _ONE_CALL.get()) is None:
        return _dump(call)
    key = tuple(map(_identity, call))
    if key not in of_all.calls:
        of_all.calls[key] = call, _dump(call)  # with the call, so that no other object takes its ids
    return of_all.calls[key][1]


def _identity(part: object) -> object:
    """Return what two parts of calls have in common that hold the same objects."""
    if isinstance(part, list):
        return tuple(map(id, part))
    if isinstance(part, dict):
        return tuple((name, id(value)) for name, value in part.items())
    return id(part)


def _dump(call: object) -> tuple[bytes, list[Tensor]]:
    file = io.BytesIO()
    pickler = _CallPickler(file)
    try:
        pickler.dump(call)
    except Exception as error:  # whatever a user's object raises when it is pickled
        raise InvalidInputError(f"an argument cannot be sent to a worker process: {error}") from error
    return file.getvalue(), pickler.tensors


def load_pickled_call(body: bytes, tensors: list[Tensor], workers: Mapping[int, object]) -> Any:
    """Return the call. Only a child calls this, only for what comes over its inherited socket."""
    return _CallUnpickler(body, tensors, workers).load()


@contextlib.contextmanager
def one_call() -> Iterator[None]:
    """Pickle once what several workers are sent in this block: nothing changes it meanwhile."""
    token = _ONE_CALL.set(_OneCall())
    try:
        yield
    finally:
        _ONE_CALL.reset(token)


class _CallPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves out worker references and plain tensors; tensors travel detached and on the host."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        # By id, and with the object: pickling may make one and drop it, and the next takes its id.
        self._seen: dict[int, tuple[Tensor, tuple[str, int | bytes]]] = {}

    def reducer_override(self, obj: object) -> Any:
        """Use a pickle made before: cloudpickle looks through all of ``sys.modules`` for each function, for ms."""
        if isinstance(obj, types.FunctionType) and (data := _pickled_before(obj)) is not None:
            return pickle.loads, (data,)
        return super().reducer_override(obj)

    def persistent_id(self, obj: object) -> tuple[str, int | bytes] | None:
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
        if tensor.nbytes < INLINE_BYTES:
            return "small", tensor_to_bytes(tensor)
        self.tensors.append(tensor)
        return "tensor", len(self.tensors) - 1


def _pickled_before(function: types.FunctionType) -> bytes | None:
    """Return a pickle of the function that can be used again; None if it must be pickled each time."""
    if _is_own_constant(function):
        known = _PICKLES
    elif (of_all := _ONE_CALL.get()) is not None:
        known = of_all.functions
    else:
        return None
    if function not in known:
        known[function] = _pickled_alone(function)
    return known[function]


def _is_own_constant(function: types.FunctionType) -> bool:
    """Return True if rlcore made it of plain values, such as ``ppo_clip(clip_low=0.2)``: it never changes."""
    return (
        (function.__module__ or "").startswith("rlcore.")
        and function.__closure__ is not None
        and all(isinstance(cell.cell_contents, _IMMUTABLE) for cell in function.__closure__)
    )


def _pickled_alone(function: types.FunctionType) -> bytes | None:
    """Return its pickle; None if it holds a tensor, which travels beside the pickle, or cannot be pickled."""
    file = io.BytesIO()
    try:
        _AlonePickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(function)
    except Exception:  # the pickler of the whole call reports it
        return None
    return file.getvalue()


class _AlonePickler(cloudpickle.Pickler):  # type: ignore[misc]
    def persistent_id(self, obj: object) -> None:
        if isinstance(obj, Tensor | WorkerReference):
            raise pickle.PicklingError(f"{type(obj).__name__}s travel beside the pickle")


def _is_decoding_cache(obj: object) -> bool:
    """Return True for what msgspec keeps in a dataclass that it has decoded: it is made anew, and has no pickle."""
    kind = type(obj)
    return kind.__module__ == "msgspec._core" and kind.__name__.endswith("Info")


class _CallUnpickler(pickle.Unpickler):
    def __init__(self, body: bytes, tensors: list[Tensor], workers: Mapping[int, object]) -> None:
        super().__init__(io.BytesIO(body))
        self._left_out: dict[str, Any] = {"tensor": tensors, "worker": workers, "none": [None]}
        self._small: dict[int, Tensor] = {}

    def persistent_load(self, reference: tuple[str, Any]) -> Any:
        kind, content = reference
        if kind != "small":
            return self._left_out[kind][content]
        if id(content) not in self._small:  # pickle gives the same bytes object where the same was put in
            self._small[id(content)] = tensor_from_bytes(content)
        return self._small[id(content)]
