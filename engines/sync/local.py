"""Weight sync between two workers of one process: the receiver gets a copy, never the trainer's own tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rlcore.engines.named_tensors import mismatch
from rlcore.errors import SyncError

ROUTE = "local"


def pair_weights(source: Iterable[tuple[str, Tensor]], model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """(source, destination) for every parameter of the receiving model; writes nothing.

    Raises:
        SyncError: the names or shapes differ.
    """
    named = dict(source)
    destination = dict(model.named_parameters())
    if found := mismatch(destination, named):
        raise SyncError(
            f"the trainer's model is not the inference engine's, which still serves its old weights: {found}"
        )
    return [(named[name], parameter.detach()) for name, parameter in destination.items()]


def copy_pairs(pairs: Iterable[tuple[Tensor, Tensor]]) -> int:
    """Overwrite each destination by its source, converted to its dtype; returns the bytes written."""
    written = 0
    with torch.no_grad():
        for source, destination in pairs:
            destination.copy_(source, non_blocking=True)
            written += destination.nbytes
    return written
