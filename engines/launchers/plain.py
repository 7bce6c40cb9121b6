"""A call as plain data, for a child that another interpreter runs: values as they are, code by its import path.

Nothing is pickled, so that the two may be of different versions of Python and of torch, and no code travels: classes
and functions are found where they are installed. Large tensors go through shared memory, as in every call.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path, PurePath
from types import FunctionType
from typing import Any

import msgspec
import torch
from torch import Tensor

from rlcore.engines.launchers.wire import SHARED_BYTES, WorkerReference, from_inlined, inlined
from rlcore.errors import InvalidInputError

_SCALARS = frozenset({type(None), bool, int, float, str, bytes})


def dump_plain_call(call: Any) -> tuple[bytes, list[Tensor]]:
    """Plain data, tensors, workers, and what is imported. Device tensors arrive on the host.

    Raises:
        InvalidInputError: an argument of another kind, or code that has no import path.
    """
    tensors: list[Tensor] = []
    try:
        return msgspec.msgpack.encode(_node(call, tensors)), tensors
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        raise InvalidInputError(f"an argument cannot be sent to another interpreter: {error}") from error


def load_plain_call(body: bytes, tensors: list[Tensor], workers: Mapping[int, Any]) -> Any:
    """What ``dump_plain_call`` was given."""
    return _Reader(tensors, workers).value(msgspec.msgpack.decode(body))


def import_path(code: Any) -> str:
    """ "package.module:name" of a class or function.

    Raises:
        InvalidInputError: it is not found there.
    """
    path = f"{code.__module__}:{code.__qualname__}"
    try:
        is_there = code.__module__ != "__main__" and _imported(path) is code
    except (ImportError, AttributeError):
        is_there = False
    if not is_there:
        raise InvalidInputError(
            f"{path} cannot be sent to another interpreter: it has no import path, and code does not travel; put it "
            "into a module that is installed there"
        )
    return path


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return attrgetter(name)(importlib.import_module(module))


# ------------------------------------------------------------------------------------------------------- sending

# A value that is not a scalar is a list [tag, content...], and so is a list: none is mistaken for another.


def _node(value: Any, tensors: list[Tensor]) -> Any:
    return value if type(value) in _SCALARS else _tagged(value, tensors)


@functools.singledispatch
def _tagged(value: Any, tensors: list[Tensor]) -> Any:
    kind = type(value)
    if kind.__module__ == "numpy" and value.ndim == 0:
        return value.item()
    fields = _fields(value)
    if fields is None:
        raise InvalidInputError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be sent to another interpreter, which takes "
            "numbers, strings, containers, tensors, paths, dataclasses, and what has an import path"
        )
    return ["object", import_path(kind), {name: _node(item, tensors) for name, item in fields}]


@_tagged.register
def _(value: Tensor, tensors: list[Tensor]) -> Any:
    if value.is_meta or value.layout is not torch.strided:
        raise InvalidInputError(f"a tensor of layout {value.layout} on {value.device} cannot be sent to a worker")
    on_host = value.detach().cpu()
    if on_host.nbytes < SHARED_BYTES:
        return ["tensor", inlined(on_host)]
    tensors.append(on_host)
    return ["shared", len(tensors) - 1]


@_tagged.register
def _(value: type | FunctionType, tensors: list[Tensor]) -> Any:
    return ["import", import_path(value)]


@_tagged.register
def _(value: torch.dtype, tensors: list[Tensor]) -> Any:
    return ["import", str(value).replace(".", ":")]


@_tagged.register
def _(value: enum.Enum, tensors: list[Tensor]) -> Any:
    return ["member", import_path(type(value)), value.value]


@_tagged.register
def _(value: WorkerReference, tensors: list[Tensor]) -> Any:
    return ["worker", value.number]


@_tagged.register
def _(value: PurePath, tensors: list[Tensor]) -> Any:
    return ["path", str(value)]


@_tagged.register
def _(value: Mapping, tensors: list[Tensor]) -> Any:  # type: ignore[type-arg]  # singledispatch takes no Mapping[...]
    return ["dict", [[_node(key, tensors), _node(item, tensors)] for key, item in value.items()]]


@_tagged.register(list)
@_tagged.register(tuple)
@_tagged.register(set)
@_tagged.register(frozenset)
def _(value: Any, tensors: list[Tensor]) -> Any:
    if hasattr(value, "_asdict"):
        return ["object", import_path(type(value)), {name: _node(item, tensors) for name, item in _fields(value) or ()}]
    if type(value) is list and _SCALARS.issuperset(map(type, value)):  # such as token ids
        return ["scalars", value]
    name = next(name for name, container in _CONTAINERS.items() if isinstance(value, container))
    return [name, [_node(item, tensors) for item in value]]


_CONTAINERS: dict[str, type[Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def _fields(value: Any) -> Iterator[tuple[str, Any]] | None:
    """Of a dataclass, a msgspec.Struct or a NamedTuple; what takes no part in comparing is the sender's own."""
    if dataclasses.is_dataclass(value):
        sent = (field for field in dataclasses.fields(value) if field.init and field.compare)
        pairs = ((field, getattr(value, field.name)) for field in sent)
        return ((field.name, found) for field, found in pairs if found is not field.default)
    if isinstance(value, msgspec.Struct):
        return iter(msgspec.structs.asdict(value).items())
    return iter(value._asdict().items()) if isinstance(value, tuple) and hasattr(value, "_asdict") else None


# ----------------------------------------------------------------------------------------------------- receiving


class _Reader:
    def __init__(self, tensors: list[Tensor], workers: Mapping[int, Any]) -> None:
        self._read: dict[str, Callable[..., Any]] = {
            "scalars": list,
            "tensor": from_inlined,
            "shared": tensors.__getitem__,
            "worker": workers.__getitem__,
            "path": Path,
            "import": _imported,
            "member": lambda path, value: _imported(path)(value),
            "object": self._object,
            "dict": lambda items: {self.value(key): self.value(item) for key, item in items},
            **{name: self._container(container) for name, container in _CONTAINERS.items()},
        }

    def value(self, node: Any) -> Any:
        return self._read[node[0]](*node[1:]) if isinstance(node, list) else node

    def _object(self, path: str, fields: dict[str, Any]) -> Any:
        return _imported(path)(**{name: self.value(item) for name, item in fields.items()})

    def _container(self, container: Callable[..., Any]) -> Callable[[list[Any]], Any]:
        return lambda items: container(map(self.value, items))
