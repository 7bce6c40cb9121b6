"""Weight sync inside one process: the engine gets a copy, never the trainer's own tensors."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlcore.errors import SyncError
from rlcore.types import SyncReport

if TYPE_CHECKING:
    from rlcore.engines.inference import InferenceEngine

ROUTE = "local"


def sync_local(source: Any, target: InferenceEngine, version: int | None) -> SyncReport:
    """Copy ``source.named_weights()`` into the target's model; between the first byte and the last it is poisoned."""
    started = time.perf_counter()
    model: nn.Module = target.begin_sync()
    pairs = _paired(dict(source.named_weights()), model)
    new_version = target.version + 1 if version is None else version
    with target.poisoned_until(new_version):
        _copy(pairs)
    moved = sum(destination.nbytes for _, destination in pairs)
    return SyncReport(
        version=new_version,
        route=ROUTE,
        moved_bytes=moved,
        needed_bytes=moved,
        fallback_bytes=0,
        handles_opened=0,
        seconds=time.perf_counter() - started,
    )


def _paired(source: Mapping[str, Tensor], model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """(source, destination) for every parameter of the model, checked before anything is written."""
    destination = dict(model.named_parameters())
    missing, unexpected = sorted(destination.keys() - source.keys()), sorted(source.keys() - destination.keys())
    reshaped = [
        f"{name} {list(source[name].shape)} for {list(destination[name].shape)}"
        for name in sorted(destination.keys() & source.keys())
        if source[name].shape != destination[name].shape
    ]
    if missing or unexpected or reshaped:
        raise SyncError(
            "the trainer's model is not the inference engine's, which still serves its old weights: "
            f"missing {missing[:5]}, unexpected {unexpected[:5]}, other shapes {reshaped[:5]}"
        )
    return [(source[name], parameter.detach()) for name, parameter in destination.items()]


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for source, destination in pairs:
            destination.copy_(source, non_blocking=True)
