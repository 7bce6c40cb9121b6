"""Where a weight is, by the name that checkpoints and inference engines have for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

Adapters = Literal["merged", "base", "only"]
"""Which weights of a module with adapters: merged into the base, the base as if there were none, or theirs alone."""


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


def whole(tensor: Tensor) -> Tensor:
    """Gathered if it is sharded, by all ranks together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def seen_in(whole: Tensor, view: Tensor) -> Tensor:
    """What ``view`` describes, in ``whole``, which is contiguous."""
    return whole.as_strided(view.shape, view.stride(), whole.storage_offset() + view.storage_offset())
