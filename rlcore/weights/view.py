"""A weight by its checkpoint name, as a view of the parameter that holds it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from rlcore._torch_private import strided_split

Adapters = Literal["merged", "base", "only"]
"""The weights of a module with adapters: with adapters merged, the base weights only, or the adapters only."""

Box = tuple[slice, ...]
"""A slice for each dimension."""

GATHER = "_rlcore_gather"
"""The attribute of a parameter whose elements another library holds: a function that returns the whole parameter."""


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
    """Return the whole tensor, without gradient; a sharded one is gathered by all ranks together."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return _joined(tensor)
    gather: Callable[[], Tensor] | None = getattr(tensor, GATHER, None)
    return tensor.detach() if gather is None else gather()


def _joined(tensor: DTensor) -> Tensor:
    """Gather what FSDP has cut of the parts of tensor parallelism first: torch warns of doing both at once."""
    for dim, placement in enumerate(tensor.placements):
        if strided_split(placement) is not None:
            tensor = tensor.redistribute(
                placements=[*tensor.placements[:dim], Replicate(), *tensor.placements[dim + 1 :]]
            )
    return tensor.full_tensor()


def seen_in(whole: Tensor, view: Tensor) -> Tensor:
    """Return the view of the contiguous tensor ``whole`` that ``view`` describes."""
    return whole.as_strided(view.shape, view.stride(), whole.storage_offset() + view.storage_offset())


def named_tensors(views: Iterable[WeightView]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of views by name: parameters, DTensors where they are sharded, and views.

    A view of a sharded parameter is a view of the gathered parameter, so all ranks iterate together to the end.
    """
    last: Tensor | None = None
    for name, parameter, view, compute, *_ in views:
        if compute is not None:
            yield name, compute()
            continue
        assert parameter is not None
        if view.shape == parameter.shape and view.is_contiguous():
            yield name, parameter.detach()
            continue
        if parameter is not last:  # views of one parameter follow each other
            last, gathered = parameter, whole(parameter)
        yield name, seen_in(gathered, view)
