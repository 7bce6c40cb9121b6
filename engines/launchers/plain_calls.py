"""Calls as plain data, for a worker process of another interpreter: values as they are, code by its import path.

Nothing is pickled, so that the two may have different versions of Python and of torch. No code travels: classes and
functions are found where they are installed.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path, PurePath
from types import FunctionType
from typing import Any

import msgspec
import torch
from torch import Tensor

from rlcore.engines.launchers.messages import WorkerReference
from rlcore.errors import InvalidInputError
from rlcore.tensor_tree import FIRST_FREE_CODE, Extension, TreeEncoder, decode_tree


class _Code(enum.IntEnum):
    """The values of a call that are no tree."""

    LIST = FIRST_FREE_CODE
    TUPLE = enum.auto()
    SET = enum.auto()
    FROZENSET = enum.auto()
    DICT = enum.auto()
    PATH = enum.auto()
    IMPORT = enum.auto()
    MEMBER = enum.auto()
    OBJECT = enum.auto()
    WORKER = enum.auto()


_CONTAINERS: dict[type[Any], _Code] = {
    list: _Code.LIST,
    tuple: _Code.TUPLE,
    set: _Code.SET,
    frozenset: _Code.FROZENSET,
}


def dump_plain_call(call: object) -> tuple[bytes, list[Tensor]]:
    """Return the bytes of a call, and the tensors that were left out; device tensors arrive on the host.

    A call holds plain data, tensors, workers, dataclasses, paths, and what is imported.

    Raises:
        InvalidInputError: an argument of another kind, or code that has no import path.
    """
    encoder = _CallEncoder()
    try:
        return encoder.encode(call), encoder.tensors
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        raise InvalidInputError(f"an argument cannot be sent to another interpreter: {error}") from error


def load_plain_call(body: bytes, tensors: list[Tensor], workers: Mapping[int, object]) -> Any:
    """Return what ``dump_plain_call`` was given, with the workers of this process by number."""
    others: dict[int, Callable[[Any], Any]] = {
        _Code.LIST: list,
        _Code.TUPLE: tuple,
        _Code.SET: set,
        _Code.FROZENSET: frozenset,
        _Code.DICT: dict,
        _Code.PATH: Path,
        _Code.IMPORT: _imported,
        _Code.MEMBER: lambda pair: _imported(pair[0])(pair[1]),
        _Code.OBJECT: lambda pair: _imported(pair[0])(**pair[1]),
        _Code.WORKER: workers.__getitem__,
    }
    return decode_tree(body, tensors, others)


def import_path(code: Any) -> str:
    """Return "package.module:name" of a class or function.

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


class _CallEncoder(TreeEncoder):
    def other(self, value: object) -> Any:
        content: Any
        match value:
            case type() | FunctionType():
                code, content = _Code.IMPORT, import_path(value)
            case torch.dtype():
                code, content = _Code.IMPORT, str(value).replace(".", ":")
            case enum.Enum():
                code, content = _Code.MEMBER, [import_path(type(value)), value.value]
            case WorkerReference():
                code, content = _Code.WORKER, value.number
            case PurePath():
                code, content = _Code.PATH, str(value)
            case Mapping():
                code, content = _Code.DICT, [[self.tagged(key), self.tagged(item)] for key, item in value.items()]
            case _ if (fields := _fields(value)) is not None:
                named = {name: self.tagged(item) for name, item in fields}
                code, content = _Code.OBJECT, [import_path(type(value)), named]
            case list() | tuple() | set() | frozenset():
                code = next(code for container, code in _CONTAINERS.items() if isinstance(value, container))
                content = [self.tagged(item) for item in value]
            case _:
                raise InvalidInputError(
                    f"a {type(value).__module__}.{type(value).__qualname__} cannot be sent to another interpreter, "
                    "which takes numbers, strings, containers, tensors, paths, dataclasses, and what has an import path"
                )
        return Extension(code.value, content)


def _fields(value: object) -> Iterator[tuple[str, Any]] | None:
    """Yield the fields of a dataclass, a msgspec.Struct or a NamedTuple; None for any other value.

    A field that takes no part in comparison belongs to the sender alone, and is left out.
    """
    if dataclasses.is_dataclass(value):
        sent = (field for field in dataclasses.fields(value) if field.init and field.compare)
        pairs = ((field, getattr(value, field.name)) for field in sent)
        return ((field.name, found) for field, found in pairs if found is not field.default)
    if isinstance(value, msgspec.Struct):
        return iter(msgspec.structs.asdict(value).items())
    return iter(value._asdict().items()) if isinstance(value, tuple) and hasattr(value, "_asdict") else None
