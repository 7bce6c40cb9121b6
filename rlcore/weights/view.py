"""Where a weight is, by the name that checkpoints and inference engines have for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

Adapters = Literal["merged", "base", "only"]
"""Which weights of a module with adapters: merged into the base, the base as if there were none, or theirs alone."""


Box = tuple[slice, ...]
"""A slice for each dimension."""


class WeightPart(NamedTuple):
    """A part of a weight that is a view of one parameter."""

    box: Box
    """In the weight."""
    parameter: Tensor
    view: Tensor
    """As that of ``WeightView``, of the box's shape, or with some of its dimensions divided."""


class WeightView(NamedTuple):
    """One weight.

    Element ``i`` of the weight is element ``view.storage_offset() + i @ view.stride()`` of its parameter, numbered row
    by row. So a rank that holds some rows of a sharded parameter knows which elements of each weight it has.
    """

    name: str
    parameter: Tensor | None
    """The Parameter itself, a DTensor where it is sharded, or a persistent buffer. None: the weight is a view of
    none, such as merged adapters; ``compute`` makes it."""
    view: Tensor
    """On meta, of the weight's shape and dtype: a view of a contiguous tensor of the parameter's whole shape."""
    compute: Callable[[], Tensor] | None = None
    """Given instead of ``parameter``: makes the whole weight on every rank. All ranks call it together, in order."""
    release: Callable[[], None] | None = None
    """Forgets what ``compute`` keeps for the weights that follow. Whoever takes only some, or has the views for longer
    than one pass over them, calls it after each pass: what is kept does not follow every change of a parameter."""
    joined: tuple[WeightPart, ...] = ()
    """Beside ``compute``, where that does nothing but join parameters: all of the weight, part by part."""

    @property
    def parts(self) -> tuple[WeightPart, ...]:
        """All of the weight as views of parameters; none if it is more than that."""
        if self.parameter is None:
            return self.joined
        return (WeightPart(whole_box(self.view), self.parameter, self.view),)


def divided(shape: Sequence[int], merged: Sequence[int]) -> list[range] | None:
    """Which dimensions of ``shape`` make each one of ``merged``, if neighbours merge to that."""
    found, start = [], 0
    for size in merged:
        stop = start + 1
        while stop < len(shape) and math.prod(shape[start:stop]) < size:
            stop += 1
        if math.prod(shape[start:stop]) != size:
            return None
        found.append(range(start, stop))
        start = stop
    return found if start == len(shape) else None


def whole_box(tensor: Tensor) -> Box:
    return tuple(slice(0, size) for size in tensor.shape)


def whole(tensor: Tensor) -> Tensor:
    """Gathered if it is sharded, by all ranks together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def seen_in(whole: Tensor, view: Tensor) -> Tensor:
    """What ``view`` describes, in ``whole``, which is contiguous."""
    return whole.as_strided(view.shape, view.stride(), whole.storage_offset() + view.storage_offset())
