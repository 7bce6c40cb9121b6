"""A nested dict, list or tuple of tensors: its description for other ranks, and its messages of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import msgspec
import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.tensor_data import dtype_name, flat_bytes

Tree = Any
"""A tensor, or a dict (keys: str, int), list or tuple of trees."""

HOST = torch.device("cpu")
_ALIGNMENT = 16  # bytes, so that a part of a message can be viewed as any dtype
_DEEPEST = 100  # containers in containers: one that contains itself would have no end
_KEYS = range(-(2**63), 2**63)


class Leaf(msgspec.Struct, frozen=True):
    """A tensor of a tree."""

    path: str
    """The index expression: "['prompts'][0]"."""
    dtype: str
    shape: tuple[int, ...]
    is_on_device: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.torch_dtype.itemsize

    @property
    def aligned_bytes(self) -> int:
        return -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT

    def rows(self, is_whole_shape: bool) -> str:
        """Return the kind of its rows, which must be the same on all ranks."""
        shape = list(map(str, self.shape)) if is_whole_shape else ["*", *map(str, self.shape[1:])][: len(self.shape)]
        return f"{self.dtype} [{', '.join(shape)}] on the {'device' if self.is_on_device else 'host'}"


class TreeSpec(msgspec.Struct, frozen=True):
    """The description of one tree that a rank sends to the others."""

    structure: Any
    """Containers as {"dict": [[key, ...]]}, {"list": [...]}, {"tuple": [...]}; tensors as their paths."""
    leaves: list[Leaf]
    problem: str = ""
    """The reason why the tree cannot be sent; "" if it can."""

    def on(self, is_on_device: bool) -> list[Leaf]:
        return [leaf for leaf in self.leaves if leaf.is_on_device == is_on_device]


class LocalTree:
    """One tree of this rank: its description and its tensors by path."""

    def __init__(self, spec: TreeSpec, tensors: dict[str, Tensor]) -> None:
        self.spec = spec
        self.tensors = tensors
        self.structure = spec.structure
        self.leaves = spec.leaves

    @classmethod
    def of(cls, tree: Tree, device: torch.device) -> LocalTree:
        """Describe ``tree``. It raises nothing: the other ranks would wait, so the description has the problem."""
        tensors: dict[str, Tensor] = {}
        try:
            structure = _described(tree, "", tensors, device)
        except InvalidInputError as error:
            return cls.refused(str(error))
        leaves = [
            Leaf(path, dtype_name(tensor.dtype), tuple(tensor.shape), tensor.device == device)
            for path, tensor in sorted(tensors.items())  # dicts may have another order on another rank
        ]
        return cls(TreeSpec(structure, leaves), tensors)

    @classmethod
    def refused(cls, problem: str) -> LocalTree:
        """Return a tree that cannot be sent."""
        return cls(TreeSpec(None, [], problem), {})

    def packed(self, is_on_device: bool) -> Tensor:
        """Return the message of its host or device tensors: [bytes] uint8."""
        leaves = self.spec.on(is_on_device)
        message = torch.empty(nbytes_of(leaves), dtype=torch.uint8, device=self.tensors[leaves[0].path].device)
        for leaf, start in zip(leaves, _starts(leaves), strict=False):
            message[start : start + leaf.nbytes].copy_(flat_bytes(self.tensors[leaf.path]))
        return message


def _described(tree: Tree, path: str, tensors: dict[str, Tensor], device: torch.device, depth: int = 0) -> Any:
    """Return the structure of a tree; add its tensors to ``tensors`` by path."""
    if isinstance(tree, Tensor):
        _check_tensor(tree, path or "the tensor", device)
        tensors[path] = tree.detach()
        return path
    if depth > _DEEPEST:
        raise InvalidInputError(f"the tree is more than {_DEEPEST} containers deep, or contains itself")
    if isinstance(tree, Mapping):
        if wrong := [key for key in tree if not _is_key(key)]:
            raise InvalidInputError(f"the keys of {path or 'the tree'} must be str or int, got {wrong[0]!a}")
        parts = {key: _described(part, f"{path}[{key!r}]", tensors, device, depth + 1) for key, part in tree.items()}
        return {"dict": list(parts.items())}
    if isinstance(tree, list | tuple):
        items = [_described(part, f"{path}[{at}]", tensors, device, depth + 1) for at, part in enumerate(tree)]
        return {"tuple" if isinstance(tree, tuple) else "list": items}
    raise InvalidInputError(f"{path or 'the tree'} must be a tensor, dict, list or tuple, got {type(tree).__name__}")


def _check_tensor(tensor: Tensor, path: str, device: torch.device) -> None:
    if other := why_not_plain(tensor):
        raise InvalidInputError(f"{path} must be a plain dense tensor, got {other}")
    if tensor.device not in (device, HOST):
        raise InvalidInputError(f"{path} is on {tensor.device}; give it on {device} or on the host")


def why_not_plain(value: Any) -> str:
    """Return what ``value`` is if it is no plain dense tensor, and what to pass instead; "" if it is one."""
    if type(value) not in (Tensor, torch.nn.Parameter):
        return f"{type(value).__name__}; of a DTensor give its to_local()"
    if value.is_nested:
        return "a nested one; give its unbind()"
    if value.is_quantized:
        return f"one quantized to {dtype_name(value.dtype)}; give its dequantize(), or int_repr()"
    return "" if value.layout == torch.strided else f"one of layout {value.layout}; give its to_dense()"


def _is_key(key: object) -> bool:
    """Return True for what a message can hold: an int of 64 bits, a str without lone surrogates."""
    if type(key) is str:
        return key == key.encode(errors="ignore").decode()
    return type(key) is int and key in _KEYS


def built(structure: Any, tensors: Mapping[str, Tensor]) -> Tree:
    """Return the tree of a structure."""
    if isinstance(structure, str):
        return tensors[structure]
    ((kind, parts),) = structure.items()
    if kind == "dict":
        return {key: built(part, tensors) for key, part in parts}
    items = [built(part, tensors) for part in parts]
    return tuple(items) if kind == "tuple" else items


def views(message: Tensor, leaves: list[Leaf]) -> dict[str, Tensor]:
    """Return the tensors of a message by path."""
    return {
        leaf.path: message[start : start + leaf.nbytes].view(leaf.torch_dtype).view(leaf.shape)
        for leaf, start in zip(leaves, _starts(leaves), strict=False)
    }


def _starts(leaves: list[Leaf]) -> list[int]:
    """Return the offset of each leaf in a message, and the length of the message; in bytes."""
    return list(accumulate((leaf.aligned_bytes for leaf in leaves), initial=0))


def nbytes_of(leaves: list[Leaf]) -> int:
    return _starts(leaves)[-1]
