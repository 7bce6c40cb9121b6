"""Collective operations on nested dicts, lists and tuples of tensors, in a few messages however many tensors there are.

    all_reduce    one message for each dtype
    others        one message, of bytes
    before        one small exchange: all ranks see each other's calls, keys, dtypes and shapes. Where these do not fit,
                  or one rank has a tree that cannot be sent, every rank raises the same error, and no data has moved

Host and device tensors may be mixed: each kind has messages of its own. The results are views of the messages' memory;
clone a tensor that is to live longer than the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from rlcore.arguments import LIST, Kind, takes
from rlcore.collectives.groups import Group
from rlcore.collectives.tree import HOST, LocalTree, Tree, TreeSpec, built, nbytes_of, views
from rlcore.errors import CollectiveError, InvalidInputError, UnsupportedError
from rlcore.tensor_data import dtype_name, flat_bytes

_GROUP = Kind("a group of rlcore.collectives.groups.new_group", lambda value: hasattr(value, "world_size"))


@takes("all_reduce of a tree", group=_GROUP)
def all_reduce(tree: Tree, group: Group, op: str = "sum") -> Tree:
    """Return a new tree with each tensor reduced over all ranks; shapes are the same on all ranks.

    Raises:
        CollectiveError: on all ranks, naming the key where they differ.
        InvalidInputError: there is no such operator, or it takes a factor.
        UnsupportedError: the operator has no meaning for one of the dtypes.
    """
    own = LocalTree.of(tree, group.device.torch_device)
    _agreed_specs([own], group, "all_reduce", f"op {op!r}", is_whole_shape=True)
    kinds = {(leaf.dtype, leaf.is_on_device): leaf.torch_dtype for leaf in own.leaves}
    _check_reducible(op, kinds.values(), group)
    reduced: dict[str, Tensor] = {}
    for kind in kinds:
        leaves = [leaf for leaf in own.leaves if (leaf.dtype, leaf.is_on_device) == kind]
        flat = torch.cat([flat_bytes(own.tensors[leaf.path]) for leaf in leaves]).view(leaves[0].torch_dtype)
        parts = torch.split(group.all_reduce(flat, op), [leaf.numel for leaf in leaves])
        reduced |= {leaf.path: part.view(leaf.shape) for leaf, part in zip(leaves, parts, strict=True)}
    return built(own.structure, reduced)


@takes("all_gather of a tree", group=_GROUP)
def all_gather(tree: Tree, group: Group) -> list[Tree]:
    """Return the trees of all ranks, by rank. First dimensions may differ between tensors and between ranks.

    Raises:
        CollectiveError: on all ranks, naming the key where keys, dtypes or the other dimensions differ.
    """
    own = LocalTree.of(tree, group.device.torch_device)
    specs = [spec for (spec,) in _agreed_specs([own], group, "all_gather")]

    def moved(is_on_device: bool) -> list[Tensor]:
        sizes = [nbytes_of(spec.on(is_on_device)) for spec in specs]
        return group.all_gather(own.packed(is_on_device), sizes=sizes)

    return _unpacked(specs, own.structure, moved)


@takes("broadcast of a tree", group=_GROUP)
def broadcast(tree: Tree | None, group: Group, source: int) -> Tree:
    """Return the tree of rank ``source``. Other ranks pass None, or a tree of the same form, which is not changed.

    Raises:
        CollectiveError: on all ranks, naming the key where a rank's tree does not fit, or a source that is no rank.
    """
    if type(source) is not int or not 0 <= source < group.world_size:
        own: LocalTree | None = LocalTree.refused(f"source must be a rank, 0 to {group.world_size - 1}, got {source!r}")
    else:
        own = LocalTree.of(tree, group.device.torch_device) if tree is not None or group.rank == source else None
    specs = _agreed_specs([own] if own else [], group, "broadcast", f"source {source!r}", is_whole_shape=True)
    (sent,) = specs[source]

    def moved(is_on_device: bool) -> list[Tensor]:
        if own and group.rank == source:
            message = own.packed(is_on_device)
        else:
            device = group.device.torch_device if is_on_device else HOST
            message = torch.empty(nbytes_of(sent.on(is_on_device)), dtype=torch.uint8, device=device)
        return [group.broadcast(message, source)]

    return _unpacked([sent], sent.structure, moved)[0]


@takes("all_to_all of trees", group=_GROUP)
def all_to_all(trees: Sequence[Tree], group: Group) -> list[Tree]:
    """Send ``trees[r]`` to rank r; return the trees that the ranks sent here, by rank. First dimensions may differ.

    Raises:
        CollectiveError: on all ranks, naming the key where keys, dtypes or the other dimensions differ, or a rank that
            has not one tree for each.
    """
    if not LIST.has(trees) or len(trees) != group.world_size:
        got = len(trees) if LIST.has(trees) else type(trees).__name__
        own = [LocalTree.refused(f"trees must be a list of one for each of {group.world_size} ranks, got {got}")]
    else:
        own = [LocalTree.of(tree, group.device.torch_device) for tree in trees]
    specs = [spec[group.rank] for spec in _agreed_specs(own, group, "all_to_all")]

    def moved(is_on_device: bool) -> list[Tensor]:
        sizes = [nbytes_of(spec.on(is_on_device)) for spec in specs]
        return group.all_to_all([tree.packed(is_on_device) for tree in own], sizes=sizes)

    return _unpacked(specs, own[group.rank].structure, moved)


# ------------------------------------------------------------------------------------------------ agreement


class _CallHeader(msgspec.Struct, frozen=True):
    """The description of a call that a rank sends to the others."""

    what: str
    argument: str
    trees: list[TreeSpec]


def _agreed_specs(
    trees: Iterable[LocalTree], group: Group, what: str, argument: str = "", *, is_whole_shape: bool = False
) -> list[list[TreeSpec]]:
    """Return each rank's descriptions of its trees, after a check that they fit."""
    own = _CallHeader(what, argument, [tree.spec for tree in trees])
    calls = [msgspec.msgpack.decode(data, type=_CallHeader) for data in group.exchange(msgspec.msgpack.encode(own))]
    specs = [call.trees for call in calls]
    all_specs = [(rank, spec) for rank, rank_specs in enumerate(specs) for spec in rank_specs]
    for rank, spec in all_specs:
        if spec.problem:
            called = f"{calls[rank].what} of a tree"
            raise CollectiveError(f"{called}: on rank {rank}, {spec.problem}", ranks=(rank,))
    _check_same_call(calls)
    for rank, spec in all_specs[1:]:
        _check_fits(all_specs[0], (rank, spec), what, is_whole_shape)
    return specs


def _check_same_call(calls: list[_CallHeader]) -> None:
    asked = [f"{call.what} {call.argument}".rstrip() for call in calls]
    for rank, other in enumerate(asked):
        if other != asked[0]:
            raise CollectiveError(
                f"{calls[0].what} of a tree: rank 0 calls {asked[0]}, and rank {rank} {other}; all must call the same",
                ranks=(0, rank),
            )


def _check_reducible(op: str, dtypes: Iterable[torch.dtype], group: Group) -> None:
    """Check all dtypes before the first is reduced."""
    if op == "premul_sum":
        raise InvalidInputError("all_reduce of a tree takes no 'premul_sum', which has a factor; multiply before")
    for dtype in dtypes:
        how = group.device.collectives.reduction(op, dtype)
        if how.support == "unsupported":
            raise UnsupportedError(f"{op} of {dtype_name(dtype)} over {group!r}", how.reason)


def _check_fits(first: tuple[int, TreeSpec], other: tuple[int, TreeSpec], what: str, is_whole_shape: bool) -> None:
    ranks = first[0], other[0]
    kinds = [{leaf.path: leaf.rows(is_whole_shape) for leaf in spec.leaves} for _, spec in (first, other)]
    for path in sorted({*kinds[0], *kinds[1]}):
        found = [kind.get(path, "absent") for kind in kinds]
        if found[0] != found[1]:
            raise CollectiveError(
                f"{what} of a tree: {path or 'the tensor'} is {found[0]} on rank {ranks[0]}, and {found[1]} on rank "
                f"{ranks[1]}; keys, dtypes and {'shapes' if is_whole_shape else 'all but first dimensions'} must fit",
                ranks=ranks,
            )


# -------------------------------------------------------------------------------------------------- packing


def _unpacked(specs: list[TreeSpec], structure: Any, moved: Callable[[bool], list[Tensor]]) -> list[Tree]:
    """Return one tree for each of ``specs``, from the messages that ``moved(is_on_device)`` returns."""
    tensors: list[dict[str, Tensor]] = [{} for _ in specs]
    for is_on_device in sorted({leaf.is_on_device for spec in specs for leaf in spec.leaves}):
        for found, spec, message in zip(tensors, specs, moved(is_on_device), strict=True):
            found.update(views(message, spec.on(is_on_device)))
    return [built(structure, found) for found in tensors]
