"""The dispatch mode under which loaders and conversions of weights run on the meta device.

It sees every operation of torch, and gives each to a handler. A subclass says which handler an operation has, and what
it remembers of the storages that its tensors lie in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from rlcore import _torch_private
from rlcore._torch_private import TorchDispatchMode, schema_of, tree_leaves

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Takes an operation, its arguments and keyword arguments, and returns what the caller of the operation gets."""


class _Dispatch(ABC):
    """Holds ``__torch_dispatch__``, which torch wraps for its compiler, at 2 us an operation, where the class that
    derives from its mode defines it."""

    def __init__(self) -> None:
        super().__init__()
        self._handlers: dict[Any, Handler] = {}

    @abstractmethod
    def handler(self, func: Any) -> Handler:
        """Return the handler of an operation; asked once for each."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = self._handlers.get(func)
        if handler is None:
            handler = self._handlers[func] = self.handler(func)
        return handler(func, args, kwargs or {})


class DispatchTracer(_Dispatch, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives every operation inside ``with tracer:`` to its handler."""


def storage_key(tensor: Tensor) -> int:
    """Return a number that no other living storage has: whoever remembers it keeps the storage alive."""
    return _torch_private.storage_key(tensor.untyped_storage())


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dicts."""
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation changes in place."""
    arguments = schema_of(func).arguments
    named = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    changed = [
        named.get(argument.name)
        for argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tensors_in(changed)
