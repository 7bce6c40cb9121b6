"""A weight by its checkpoint name, as a view of the parameter that holds it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

Adapters = Literal["merged", "base", "only"]
"""The weights of a module with adapters: with adapters merged, the base weights only, or the adapters only."""

Box = tuple[slice, ...]
"""A slice for each dimension."""


class WeightPart(NamedTuple):
    """A part of a weight that is a view of one parameter."""

    box: Box
    """The place of the part in the weight."""
    parameter: Tensor
    view: Tensor
    """A view as in ``WeightView``, of the box's shape, or with some of its dimensions divided."""


class WeightView(NamedTuple):
    """One weight.

    Element ``i`` of the weight is element ``view.storage_offset() + i @ view.stride()`` of its parameter, numbered row
    by row. So a rank that holds some rows of a sharded parameter knows which elements of each weight it has.
    """

    name: str
    parameter: Tensor | None
    """The Parameter itself, a DTensor where it is sharded, or a persistent buffer. None where the weight is a view of
    no parameter, as with merged adapters; ``compute`` makes it then."""
    view: Tensor
    """On meta, of the weight's shape and dtype: a view of a contiguous tensor of the parameter's whole shape."""
    compute: Callable[[], Tensor] | None = None
    """Present instead of ``parameter``: makes the whole weight on every rank. All ranks call it together, in order."""
    release: Callable[[], None] | None = None
    """Forgets the tensors that ``compute`` keeps for the next weights. A caller that skips views, or reuses them for
    another pass, calls it after each pass: the kept tensors do not follow every change of a parameter."""
    joined: tuple[WeightPart, ...] = ()
    """Present beside ``compute`` if that only joins parameters: the parts that make all of the weight."""

    @property
    def parts(self) -> tuple[WeightPart, ...]:
        """Return all of the weight as views of parameters; empty if it is more than that."""
        if self.parameter is None:
            return self.joined
        return (WeightPart(whole_box(self.view), self.parameter, self.view),)


def divided(shape: Sequence[int], merged: Sequence[int]) -> list[range] | None:
    """Return for each dimension of ``merged`` the neighbours in ``shape`` that merge to it; None if they do not."""
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
    """Return the whole tensor; a sharded one is gathered by all ranks together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def seen_in(whole: Tensor, view: Tensor) -> Tensor:
    """Return the view of the contiguous tensor ``whole`` that ``view`` describes."""
    return whole.as_strided(view.shape, view.stride(), whole.storage_offset() + view.storage_offset())
