"""Weight sync between two workers of one process: the receiver gets a copy, never the trainer's own tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rlcore.errors import SyncError

ROUTE = "local"


def pair_weights(source: Iterable[tuple[str, Tensor]], model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """(source, destination) for every parameter of the receiving model; writes nothing.

    Raises:
        SyncError: the names or shapes differ.
    """
    named = dict(source)
    destination = dict(model.named_parameters())
    missing, unexpected = sorted(destination.keys() - named.keys()), sorted(named.keys() - destination.keys())
    reshaped = [
        f"{name} {list(named[name].shape)} for {list(destination[name].shape)}"
        for name in sorted(destination.keys() & named.keys())
        if named[name].shape != destination[name].shape
    ]
    if missing or unexpected or reshaped:
        raise SyncError(
            "the trainer's model is not the inference engine's, which still serves its old weights: "
            f"missing {missing[:5]}, unexpected {unexpected[:5]}, other shapes {reshaped[:5]}"
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
