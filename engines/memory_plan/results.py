"""The results of operators on the meta device, made again without running them.

A result has a shape, strides and a dtype, which follow from those of the arguments. torch finds them in Python, which
takes up to a millisecond for each operator; the layers of a model, and its micro-batches, ask for the same again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rlcore._torch_private import schema_of, storage_key, tree_leaves

_Key = tuple[Any, ...]
_Make = Callable[[Any], Any]
"""From an operator's arguments to its result."""


class Results:
    """Runs one operator, once for arguments that are alike."""

    def __init__(self, func: Any) -> None:
        self._func, self._is_known = func, func.namespace == "aten"
        self._makers: dict[_Key, _Make | None] = {}
        """None: what must run each time, such as a view."""

    def of(self, args: Any, kwargs: Any) -> Any:
        """Return what the operator gives for these arguments."""
        key = _key(args, kwargs) if self._is_known else None
        if key is None:
            return self._func(*args, **kwargs)
        make = self._makers.get(key)
        if make is not None:
            return make(args)
        result = self._func(*args, **kwargs)
        if key not in self._makers:
            self._makers[key] = _maker(self._func, args, result, before=key[0])
        return result


def _key(args: Any, kwargs: Any) -> _Key | None:
    """Return what the result follows from; None where that is not known."""
    try:
        key = *map(_described, args), *[(name, _described(value)) for name, value in kwargs.items()]
        hash(key)
    except (_UnknownError, TypeError):
        return None
    return key or None


class _UnknownError(Exception):
    """An argument is no meta tensor, and no plain value."""


def _described(value: Any) -> Any:
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        if value.device.type != "meta":
            raise _UnknownError
        return value.shape, value.stride(), value.dtype
    if kind is list or kind is tuple:
        return tuple(map(_described, value))
    if isinstance(value, Tensor):
        raise _UnknownError
    return kind, value  # 1, 1.0 and True are equal


def _maker(func: Any, args: Any, result: Any, before: Any) -> _Make | None:
    """Return a function that makes ``result`` again: it is a new tensor, or the argument that was changed.

    Args:
        before: the description of the first argument before it was changed.
    """
    if not isinstance(result, Tensor) or result.device.type != "meta":
        return None
    changes = [argument.alias_info is not None for argument in schema_of(func).arguments]
    if any(changes):
        is_same = result is args[0] and changes.count(True) == 1 and _described(result) == before
        return (lambda args: args[0]) if is_same else None
    shared = {storage_key(leaf.untyped_storage()) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
    if storage_key(result.untyped_storage()) in shared:  # not all views say so
        return None
    shape, strides, dtype, device = result.shape, result.stride(), result.dtype, result.device
    return lambda args: torch.empty_strided(shape, strides, dtype=dtype, device=device)
