"""The elements of a weight that this rank holds, where the weight is a view of a sharded parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from rlcore.weights.shards import local_part, own_box
from rlcore.weights.view import Box, WeightPart, divided, whole_box


class LocalPiece(NamedTuple):
    """Elements of a weight that lie in this rank's rows of a parameter."""

    box: Box
    """Their place in the weight."""
    tensor: Tensor
    """A view of the rank's own part that has these elements."""


def own_pieces(view: Tensor, parameter: Tensor, local: Tensor | None = None) -> Iterator[LocalPiece]:
    """Cut the part of a weight that this rank holds into boxes, which together are all of it.

    Args:
        view: the weight as a view of the whole parameter, as in ``WeightView``.
        parameter: the parameter, whose rows are sharded.
        local: used in place of this rank's part of ``parameter``; None is that part.
    """
    part = local_part(parameter.detach()) if local is None else local
    if part.numel() and view.numel():
        rows = own_box(parameter)[0] if parameter.dim() else slice(0, 1)
        yield from _pieces(
            view, whole_box(view), _RowRange(rows.start, rows.stop, math.prod(parameter.shape[1:])), part
        )


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


class _RowRange(NamedTuple):
    start: int
    stop: int
    size: int


def _pieces(view: Tensor, box: Box, rows: _RowRange, part: Tensor) -> Iterator[LocalPiece]:
    """Yield the pieces of ``view``, which is ``box`` of the weight."""
    over_rows = [dim for dim in range(view.dim()) if view.shape[dim] > 1 and view.stride(dim) >= rows.size]
    within = sum((view.shape[dim] - 1) * view.stride(dim) for dim in range(view.dim()) if dim not in over_rows)
    first_row, column = divmod(int(view.storage_offset()), rows.size)
    step, uneven = divmod(view.stride(over_rows[0]), rows.size) if over_rows else (1, 0)
    if len(over_rows) > 1 or uneven or column + within >= rows.size:
        yield from _one_by_one(view, box, rows, part)
        return
    count = view.shape[over_rows[0]] if over_rows else 1
    start, stop = max(0, -(-(rows.start - first_row) // step)), min(count, -(-(rows.stop - first_row) // step))
    if start >= stop:
        return
    if over_rows:
        view, box = _narrowed(view, box, over_rows[0], slice(start, stop))
    offset = part.storage_offset() + view.storage_offset() - rows.start * rows.size
    yield LocalPiece(box, part.as_strided(view.shape, view.stride(), offset))


def _one_by_one(view: Tensor, box: Box, rows: _RowRange, part: Tensor) -> Iterator[LocalPiece]:
    """Cut along the dimension of the longest stride, for elements that are not at an even distance in rows."""
    dim = max(range(view.dim()), key=lambda dim: (view.shape[dim] > 1) * view.stride(dim))
    for index in range(view.shape[dim]):
        yield from _pieces(*_narrowed(view, box, dim, slice(index, index + 1)), rows, part)


def _narrowed(view: Tensor, box: Box, dim: int, to: slice) -> tuple[Tensor, Box]:
    at = box[dim].start
    inner = slice(at + to.start, at + to.stop)
    return view.narrow(dim, to.start, to.stop - to.start), (*box[:dim], inner, *box[dim + 1 :])
