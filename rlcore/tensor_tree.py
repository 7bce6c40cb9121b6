"""Trees of plain values and tensors as bytes, with the large tensors beside them. Nothing is pickled.

A tree is None, a bool, int, float, str or bytes, a dense tensor, or a list, tuple or dict of trees, the dict with plain
values as keys. The bytes are msgpack, so that a process of another version of Python or torch can read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from rlcore.decoding import decode
from rlcore.errors import InvalidInputError
from rlcore.tensor_data import dtype_name, host_bytes

INLINE_BYTES = 64 << 10
"""A smaller tensor travels in the bytes: that is cheaper, and who keeps it keeps no shared memory."""
PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_TENSOR, _SMALL_TENSOR, _TUPLE = 1, 2, 3
FIRST_FREE_CODE = 4
"""The codes of ``Extension`` from here on are for those who extend trees by other values."""


class Extension:
    """A value that msgpack has not: a code, and a tree that stands for the value."""

    def __init__(self, code: int, content: Any) -> None:
        self.code = code
        self.content = content


class TreeEncoder:
    """Encodes one tree; ``tensors`` are then those that were left out, on the host.

    It keeps no encoder of msgspec: the cycle would keep the tensors alive.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def encode(self, tree: Any) -> bytes:
        """Raises whatever msgspec, a device or ``other`` raises for a value that cannot be encoded."""
        return msgspec.msgpack.encode(self.tagged(tree), enc_hook=self._extension)

    def tagged(self, value: Any) -> Any:
        """Return the value with an ``Extension`` for all that msgpack has not, but for tensors."""
        kind = type(value)
        if kind in PLAIN or isinstance(value, Tensor):
            return value
        if kind is list:  # of scalars alone, such as token ids, it needs no copy
            return value if PLAIN.issuperset(map(type, value)) else [self.tagged(item) for item in value]
        if kind is tuple:
            return Extension(_TUPLE, [self.tagged(item) for item in value])
        if isinstance(value, dict) and PLAIN.issuperset(map(type, value)):  # such as a state_dict; comes back as a dict
            return {key: self.tagged(item) for key, item in value.items()}
        if kind.__module__ == "numpy" and value.ndim == 0:
            return value.item()
        return self.other(value)

    def other(self, value: Any) -> Any:
        """Return what stands for a value that is no tree, such as an ``Extension``; or raise TypeError."""
        raise TypeError(type(value).__name__)

    def _extension(self, obj: Any) -> msgspec.msgpack.Ext:
        if type(obj) is Extension:
            return msgspec.msgpack.Ext(obj.code, msgspec.msgpack.encode(obj.content, enc_hook=self._extension))
        if type(obj) not in (Tensor, nn.Parameter) or obj.is_meta or obj.layout is not torch.strided:
            layout = f" of layout {obj.layout} on {obj.device}" if isinstance(obj, Tensor) else ""
            raise TypeError(f"{type(obj).__name__}{layout}")
        tensor = obj.detach().cpu()
        if tensor.nbytes < INLINE_BYTES:
            return msgspec.msgpack.Ext(_SMALL_TENSOR, tensor_to_bytes(tensor))
        self.tensors.append(tensor)
        return msgspec.msgpack.Ext(_TENSOR, len(self.tensors).to_bytes(4, "little"))


class _Extensions:
    """Decodes extensions. A class, because a recursive closure would be a cycle that keeps the tensors alive."""

    def __init__(self, tensors: list[Tensor], others: Mapping[int, Callable[[Any], Any]]) -> None:
        self._tensors = tensors
        self._others = others

    def __call__(self, code: int, data: memoryview) -> Any:
        if code == _TENSOR:
            return self._left_out(int.from_bytes(data, "little"))
        if code == _SMALL_TENSOR:
            return tensor_from_bytes(data)
        if code == _TUPLE:
            return tuple(self.decode(data, list[Any]))
        if code not in self._others:
            raise InvalidInputError(f"these bytes are no tree: it has an extension of code {code}")
        return self._others[code](self.decode(data, Any))

    def decode(self, data: bytes | memoryview, kind: Any) -> Any:
        return decode(data, kind, "tree", error=InvalidInputError, ext_hook=self)

    def _left_out(self, number: int) -> Tensor:
        if number not in range(1, len(self._tensors) + 1):
            raise InvalidInputError(f"these bytes are no tree: it refers to tensor {number} of {len(self._tensors)}")
        return self._tensors[number - 1]


def decode_tree(data: bytes, tensors: list[Tensor], others: Mapping[int, Callable[[Any], Any]] | None = None) -> Any:
    """Return the tree that ``TreeEncoder`` encoded.

    Args:
        tensors: those that were left out.
        others: makes a value of the content of an ``Extension``, by code. What they raise is raised, but for ValueError
            and TypeError.

    Raises:
        InvalidInputError: the bytes are something else.
    """
    return _Extensions(tensors, others or {}).decode(data, Any)


def tensor_to_bytes(tensor: Tensor) -> bytes:
    """Return dtype, shape and values of a tensor on the host."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return msgspec.msgpack.encode((dtype_name(tensor.dtype), tuple(tensor.shape), host_bytes(plain)))


def tensor_from_bytes(data: bytes | memoryview) -> Tensor:
    """Return the tensor that ``tensor_to_bytes`` wrote, in memory of its own.

    Raises:
        InvalidInputError: the bytes are something else.
    """
    name, shape, values = decode(data, tuple[str, tuple[int, ...], memoryview], "tensor", error=InvalidInputError)
    return new_tensor(name, shape, values)


def new_tensor(name: str, shape: tuple[int, ...], values: bytes | memoryview) -> Tensor:
    """Return a tensor of these values, in memory of its own.

    Args:
        name: of the dtype, as ``dtype_name`` gives it.

    Raises:
        InvalidInputError: there is no such dtype, or it and the shape make another number of bytes.
    """
    _check_size(name, shape, len(values))
    # Torch cannot resize the storage of a buffer that Python owns, so that the bytes are copied into one of its own.
    flat = torch.empty(len(values), dtype=torch.uint8)
    if len(values):  # of an empty tensor there are no bytes to write to
        host_bytes(flat).cast("B")[:] = values
    return viewed_as(flat, name, shape)


def viewed_as(flat: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return bytes, a uint8 tensor of one dimension, as a tensor of this dtype and shape. Raises as ``new_tensor``."""
    _check_size(name, shape, len(flat))
    return flat.view(getattr(torch, name)).view(shape)


def _check_size(name: str, shape: tuple[int, ...], num_bytes: int) -> None:
    dtype: Any = getattr(torch, name, None)
    is_kind = isinstance(dtype, torch.dtype) and min(shape, default=0) >= 0
    if not is_kind or math.prod(shape) * dtype.itemsize != num_bytes:
        raise InvalidInputError(f"these {num_bytes} bytes are no {name} of shape {shape}")
