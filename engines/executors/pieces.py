"""The elements of a weight that this rank holds, where the weight is a view of a sharded parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from rlcore.weights.shards import local_part, own_box
from rlcore.weights.view import Box, WeightPart, divided, whole_box


class LocalPiece(NamedTuple):
    """Elements of a weight that lie in this rank's box of a parameter."""

    box: Box
    """Their place in the weight."""
    tensor: Tensor
    """A view of the rank's own part that has these elements."""


def own_pieces(view: Tensor, parameter: Tensor, local: Tensor | None = None) -> Iterator[LocalPiece]:
    """Cut the part of a weight that this rank holds into boxes, which together are all of it.

    Args:
        view: the weight as a view of the whole parameter, as in ``WeightView``.
        parameter: the parameter, which may be sharded.
        local: used in place of this rank's part of ``parameter``; None is that part.
    """
    part = local_part(parameter.detach()) if local is None else local
    if part.numel() and view.numel():
        yield from _pieces(view, whole_box(view), _Held.of(parameter), part)


def read_piece(read: Callable[[Box], Tensor], part: WeightPart, box: Box) -> Tensor:
    """Return the elements of a weight that are ``box`` of the view of its part.

    Args:
        read: gives a box of the weight. Where the view divides a dimension, it is asked for the box's range of the
            outermost part, and only there for more than is returned.
    """
    groups = divided(part.view.shape, [side.stop - side.start for side in part.box])
    assert groups is not None
    asked, shape, within = [], [], []
    for side, (first, *rest) in zip(part.box, groups, strict=True):
        inner = [part.view.shape[dim] for dim in rest]
        step = math.prod(inner)
        asked.append(slice(side.start + box[first].start * step, side.start + box[first].stop * step))
        shape += [box[first].stop - box[first].start, *inner]
        within += [slice(None), *(box[dim] for dim in rest)]
    return read(tuple(asked)).view(shape)[tuple(within)]


def fill(part: WeightPart, weight: Tensor) -> None:
    """Copy this rank's elements of a whole weight into the parameter of which ``part`` is a view."""
    parameter, view = part.parameter.detach(), part.view
    is_all = view.is_contiguous() and view.numel() == parameter.numel() == weight.numel()
    if parameter.dim() == 1 and is_all:  # a flat one: row by row it would be a piece for each row
        (own,) = own_box(parameter)
        local_part(parameter).copy_(weight.reshape(-1)[own])
        return
    for box, tensor in own_pieces(view, parameter):
        tensor.copy_(read_piece(weight.__getitem__, part, box))


class _Held(NamedTuple):
    """The box of a parameter that this rank holds. The dimensions after the last one that is cut are taken as one."""

    bounds: tuple[tuple[int, int], ...]
    """(first, end) of each dimension."""
    shape: tuple[int, ...]
    """The whole parameter's."""

    @staticmethod
    def of(parameter: Tensor) -> _Held:
        sizes = tuple(parameter.shape) or (1,)
        sides = [(side.start, side.stop) for side in own_box(parameter)] or [(0, 1)]
        last = max((dim for dim, size in enumerate(sizes) if sides[dim] != (0, size)), default=0)
        rest = math.prod(sizes[last + 1 :])
        return _Held((*sides[: last + 1], (0, rest)), (*sizes[: last + 1], rest))

    @property
    def stride(self) -> tuple[int, ...]:
        """Return the strides of the whole parameter."""
        return _contiguous(self.shape)

    @property
    def own_stride(self) -> tuple[int, ...]:
        """Return the strides of what is held."""
        return _contiguous([end - first for first, end in self.bounds])


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _pieces(view: Tensor, box: Box, held: _Held, part: Tensor) -> Iterator[LocalPiece]:
    """Yield the pieces of ``view``, which is ``box`` of the weight."""
    first = _coordinates(int(view.storage_offset()), held.stride)
    along: list[list[int]] = [[] for _ in held.shape]
    for dim in range(view.dim()):
        if view.shape[dim] > 1:
            along[next(axis for axis, step in enumerate(held.stride) if view.stride(dim) >= step)].append(dim)
    if not _is_regular(view, held, first, along):
        yield from _one_by_one(view, box, held, part)
        return
    for axis, ((start, stop), step) in enumerate(zip(held.bounds, held.stride, strict=True)):
        if (start, stop) == (0, held.shape[axis]):
            continue
        cut = along[axis][0] if along[axis] else None
        apart, count = (1, 1) if cut is None else (view.stride(cut) // step, view.shape[cut])
        low, high = max(0, -(-(start - first[axis]) // apart)), min(count, -(-(stop - first[axis]) // apart))
        if low >= high:
            return
        if cut is not None:
            view, box = _narrowed(view, box, cut, slice(low, high))
    steps = dict.fromkeys(range(view.dim()), 0)
    for axis, dims in enumerate(along):
        steps |= {dim: view.stride(dim) // held.stride[axis] * held.own_stride[axis] for dim in dims}
    at = _coordinates(int(view.storage_offset()), held.stride)
    own = sum((a - start) * step for a, (start, _), step in zip(at, held.bounds, held.own_stride, strict=True))
    yield LocalPiece(box, part.as_strided(view.shape, tuple(steps.values()), part.storage_offset() + own))


def _coordinates(offset: int, stride: Sequence[int]) -> list[int]:
    found = []
    for step in stride:
        place, offset = divmod(offset, step)
        found.append(place)
    return found


def _is_regular(view: Tensor, held: _Held, first: Sequence[int], along: Sequence[Sequence[int]]) -> bool:
    """Return True if each dimension of a view runs along one of the parameter's, and one at most along a cut one."""
    for axis, dims in enumerate(along):
        is_cut = held.bounds[axis] != (0, held.shape[axis])
        if (is_cut and len(dims) > 1) or any(view.stride(dim) % held.stride[axis] for dim in dims):
            return False
        reach = sum((view.shape[dim] - 1) * (view.stride(dim) // held.stride[axis]) for dim in dims)
        if first[axis] + reach >= held.shape[axis]:
            return False
    return True


def _one_by_one(view: Tensor, box: Box, held: _Held, part: Tensor) -> Iterator[LocalPiece]:
    """Cut along the dimension of the longest stride, for elements that are not at an even distance in rows."""
    dim = max(range(view.dim()), key=lambda dim: (view.shape[dim] > 1) * view.stride(dim))
    for index in range(view.shape[dim]):
        yield from _pieces(*_narrowed(view, box, dim, slice(index, index + 1)), held, part)


def _narrowed(view: Tensor, box: Box, dim: int, to: slice) -> tuple[Tensor, Box]:
    at = box[dim].start
    inner = slice(at + to.start, at + to.stop)
    return view.narrow(dim, to.start, to.stop - to.start), (*box[:dim], inner, *box[dim + 1 :])
