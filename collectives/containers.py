"""Collective operations on nested dicts, lists and tuples of tensors, in a few messages however many tensors there are.

    all_reduce    one message for each dtype
    others        one message, of bytes
    before        one small exchange, in which all ranks see each other's keys, dtypes and shapes: where these do not
                  fit, every rank raises the same error, and no data has moved

Host and device tensors may be mixed: each kind has messages of its own. What comes back are views of the messages'
memory; clone what is to outlive the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from rlcore.errors import CollectiveError, InvalidInputError
from rlcore.tensor_data import dtype_name

Tree = Any
"""A tensor, or a dict (keys: str, int), list or tuple of trees."""

_HOST = torch.device("cpu")
_ALIGNMENT = 16  # bytes, so that a part of a message can be viewed as any dtype


class ContainerGroup(Protocol):
    """What is used of a ``Group``."""

    device: Any
    rank: int
    world_size: int

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor: ...
    def all_gather(self, tensor: Tensor, *, sizes: Sequence[int] | None = None) -> list[Tensor]: ...
    def all_to_all(self, tensors: Sequence[Tensor], *, sizes: Sequence[int] | None = None) -> list[Tensor]: ...
    def broadcast(self, tensor: Tensor, source: int) -> Tensor: ...
    def exchange(self, data: bytes) -> list[bytes]: ...


def all_reduce(tree: Tree, group: ContainerGroup, op: str = "sum") -> Tree:
    """Each tensor reduced over all ranks, in a new tree; shapes are the same on all ranks.

    Raises:
        CollectiveError: on all ranks, naming the key where they differ.
        UnsupportedError: the operator has no meaning for one of the dtypes.
    """
    own = _Parcel.of(tree, group)
    _meet([own], group, "all_reduce", is_whole_shape=True)
    reduced: dict[str, Tensor] = {}
    for kind in {(leaf.dtype, leaf.is_on_device): None for leaf in own.leaves}:
        leaves = [leaf for leaf in own.leaves if (leaf.dtype, leaf.is_on_device) == kind]
        flat = torch.cat([_bytes(own.tensors[leaf.path]) for leaf in leaves]).view(leaves[0].torch_dtype)
        parts = torch.split(group.all_reduce(flat, op), [leaf.numel for leaf in leaves])
        reduced |= {leaf.path: part.view(leaf.shape) for leaf, part in zip(leaves, parts, strict=True)}
    return _built(own.structure, reduced)


def all_gather(tree: Tree, group: ContainerGroup) -> list[Tree]:
    """The trees of all ranks, by rank. First dimensions may differ, between tensors and between ranks.

    Raises:
        CollectiveError: on all ranks, naming the key where keys, dtypes or the other dimensions differ.
    """
    own = _Parcel.of(tree, group)
    told = [announced for (announced,) in _meet([own], group, "all_gather")]

    def moved(is_on_device: bool) -> list[Tensor]:
        sizes = [_nbytes(announced.on(is_on_device)) for announced in told]
        return group.all_gather(own.packed(is_on_device), sizes=sizes)

    return _unpacked(told, own.structure, moved)


def broadcast(tree: Tree | None, group: ContainerGroup, source: int) -> Tree:
    """The tree of rank ``source``. Other ranks give None, or a tree that it must fit, which is left as it is.

    Raises:
        CollectiveError: on all ranks, naming the key where a rank's tree does not fit.
    """
    if not 0 <= source < group.world_size:
        raise InvalidInputError(f"source must be a rank of {group!r}, got {source!r}")
    own = _Parcel.of(tree, group) if tree is not None or group.rank == source else None
    told = _meet([own] if own else [], group, "broadcast", is_whole_shape=True)
    (sent,) = told[source]

    def moved(is_on_device: bool) -> list[Tensor]:
        if own and group.rank == source:
            message = own.packed(is_on_device)
        else:
            place = group.device.torch_device if is_on_device else _HOST
            message = torch.empty(_nbytes(sent.on(is_on_device)), dtype=torch.uint8, device=place)
        return [group.broadcast(message, source)]

    return _unpacked([sent], sent.structure, moved)[0]


def all_to_all(trees: Sequence[Tree], group: ContainerGroup) -> list[Tree]:
    """Send ``trees[r]`` to rank r; the trees that the ranks sent here, by rank. First dimensions may differ.

    Raises:
        InvalidInputError: ``trees`` has not one tree for each rank.
        CollectiveError: on all ranks, naming the key where keys, dtypes or the other dimensions differ.
    """
    if len(trees) != group.world_size:
        raise InvalidInputError(f"all_to_all takes a tree for each of {group.world_size} ranks, got {len(trees)}")
    own = [_Parcel.of(tree, group) for tree in trees]
    told = [announced[group.rank] for announced in _meet(own, group, "all_to_all")]

    def moved(is_on_device: bool) -> list[Tensor]:
        sizes = [_nbytes(announced.on(is_on_device)) for announced in told]
        return group.all_to_all([parcel.packed(is_on_device) for parcel in own], sizes=sizes)

    return _unpacked(told, own[group.rank].structure, moved)


# ---------------------------------------------------------------------------------------------- description


class _Leaf(msgspec.Struct, frozen=True):
    """A tensor of a tree."""

    path: str
    """As it is indexed: "['prompts'][0]"."""
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
        """What must be the same on all ranks."""
        shape = list(map(str, self.shape)) if is_whole_shape else ["*", *map(str, self.shape[1:])][: len(self.shape)]
        return f"{self.dtype} [{', '.join(shape)}] on the {'device' if self.is_on_device else 'host'}"


class _Announced(msgspec.Struct, frozen=True):
    """What a rank tells of one tree."""

    structure: Any
    """Containers as {"dict": [[key, ...]]}, {"list": [...]}, {"tuple": [...]}; tensors as their paths."""
    leaves: list[_Leaf]
    problem: str = ""
    """Why it cannot be sent."""

    def on(self, is_on_device: bool) -> list[_Leaf]:
        return [leaf for leaf in self.leaves if leaf.is_on_device == is_on_device]


class _Parcel:
    """One tree of this rank, ready to be announced and packed."""

    def __init__(self, announced: _Announced, tensors: dict[str, Tensor]) -> None:
        self.announced = announced
        self.tensors = tensors
        self.structure = announced.structure
        self.leaves = announced.leaves

    @classmethod
    def of(cls, tree: Tree, group: ContainerGroup) -> _Parcel:
        tensors: dict[str, Tensor] = {}
        device = group.device.torch_device
        try:
            structure = _described(tree, "", tensors, device)
        except InvalidInputError as error:  # told to the others, who would wait
            return cls(_Announced(None, [], str(error)), {})
        leaves = [
            _Leaf(path, dtype_name(tensor.dtype), tuple(tensor.shape), tensor.device == device)
            for path, tensor in sorted(tensors.items())  # dicts may be ordered otherwise on another rank
        ]
        return cls(_Announced(structure, leaves), tensors)

    def packed(self, is_on_device: bool) -> Tensor:
        """[bytes] uint8."""
        leaves = self.announced.on(is_on_device)
        message = torch.empty(_nbytes(leaves), dtype=torch.uint8, device=self.tensors[leaves[0].path].device)
        for leaf, start in zip(leaves, _starts(leaves), strict=False):
            message[start : start + leaf.nbytes].copy_(_bytes(self.tensors[leaf.path]))
        return message


def _described(tree: Tree, path: str, tensors: dict[str, Tensor], device: torch.device) -> Any:
    """The structure of a tree; its tensors are added to ``tensors`` by path."""
    if isinstance(tree, Tensor):
        if tree.device not in (device, _HOST):
            raise InvalidInputError(f"{path or 'the tensor'} is on {tree.device}; give it on {device} or on the host")
        tensors[path] = tree.detach()
        return path
    if isinstance(tree, Mapping):
        if wrong := [key for key in tree if type(key) not in (str, int)]:
            raise InvalidInputError(f"the keys of {path or 'the tree'} must be str or int, got {wrong[0]!r}")
        return {"dict": [[k, _described(part, f"{path}[{k!r}]", tensors, device)] for k, part in tree.items()]}
    if isinstance(tree, list | tuple):
        parts = [_described(part, f"{path}[{index}]", tensors, device) for index, part in enumerate(tree)]
        return {"tuple" if isinstance(tree, tuple) else "list": parts}
    raise InvalidInputError(f"{path or 'the tree'} must be a tensor, dict, list or tuple, got {type(tree).__name__}")


def _built(structure: Any, tensors: Mapping[str, Tensor]) -> Tree:
    if isinstance(structure, str):
        return tensors[structure]
    ((kind, parts),) = structure.items()
    if kind == "dict":
        return {key: _built(part, tensors) for key, part in parts}
    items = [_built(part, tensors) for part in parts]
    return tuple(items) if kind == "tuple" else items


# ------------------------------------------------------------------------------------------------ agreement


def _meet(
    parcels: Iterable[_Parcel], group: ContainerGroup, what: str, *, is_whole_shape: bool = False
) -> list[list[_Announced]]:
    """What each rank announces, once all of it is seen to fit."""
    data = group.exchange(msgspec.msgpack.encode([parcel.announced for parcel in parcels]))
    told = [msgspec.msgpack.decode(part, type=list[_Announced]) for part in data]
    every = [(rank, announced) for rank, rank_told in enumerate(told) for announced in rank_told]
    for rank, announced in every:
        if announced.problem:
            raise CollectiveError(f"{what} of a tree: on rank {rank}, {announced.problem}", ranks=(rank,))
    for rank, announced in every[1:]:
        _check_fits(every[0], (rank, announced), what, is_whole_shape)
    return told


def _check_fits(first: tuple[int, _Announced], other: tuple[int, _Announced], what: str, is_whole_shape: bool) -> None:
    ranks = first[0], other[0]
    kinds = [{leaf.path: leaf.rows(is_whole_shape) for leaf in announced.leaves} for _, announced in (first, other)]
    for path in sorted({*kinds[0], *kinds[1]}):
        found = [kind.get(path, "absent") for kind in kinds]
        if found[0] != found[1]:
            raise CollectiveError(
                f"{what} of a tree: {path or 'the tensor'} is {found[0]} on rank {ranks[0]}, and {found[1]} on rank "
                f"{ranks[1]}; keys, dtypes and {'shapes' if is_whole_shape else 'all but first dimensions'} must fit",
                ranks=ranks,
            )


# -------------------------------------------------------------------------------------------------- packing


def _unpacked(told: list[_Announced], structure: Any, moved: Callable[[bool], list[Tensor]]) -> list[Tree]:
    """One tree for each that was told, of the messages that ``moved(is_on_device)`` brings."""
    tensors: list[dict[str, Tensor]] = [{} for _ in told]
    for is_on_device in sorted({leaf.is_on_device for announced in told for leaf in announced.leaves}):
        for found, announced, message in zip(tensors, told, moved(is_on_device), strict=True):
            found.update(_views(message, announced.on(is_on_device)))
    return [_built(structure, found) for found in tensors]


def _views(message: Tensor, leaves: list[_Leaf]) -> dict[str, Tensor]:
    return {
        leaf.path: message[start : start + leaf.nbytes].view(leaf.torch_dtype).view(leaf.shape)
        for leaf, start in zip(leaves, _starts(leaves), strict=False)
    }


def _starts(leaves: list[_Leaf]) -> list[int]:
    """Where each begins in a message, and where the message ends; in bytes."""
    return list(accumulate((leaf.aligned_bytes for leaf in leaves), initial=0))


def _nbytes(leaves: list[_Leaf]) -> int:
    return _starts(leaves)[-1]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
