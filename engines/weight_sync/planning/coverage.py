"""The coverage of an engine's tensors by the trainer's weights: a missing part is told from padding.

A part of a fused tensor that the trainer does not have looks like padding, which no weight fills. The engine's own
checkpoint tells them apart: it leaves padding unwritten too.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import Tensor

from rlcore.engines.weight_sync.planning.dispatch_trace import FromWeight
from rlcore.engines.weight_sync.planning.loader_trace import LoaderTrace, trace_loader
from rlcore.engines.weight_sync.planning.manifest import describe
from rlcore.engines.weight_sync.target import Target
from rlcore.weights.view import WeightView


def missing_part(trace: LoaderTrace, target: Target) -> str:
    """Name a tensor that the trainer's weights fill in part and the engine's own fill more of; or ""."""
    if not trace.unwritten:
        return ""
    checkpoint = target.checkpoint()
    if checkpoint is None:
        if trace.failures:  # it may be these that would fill the rest
            return ""
        return f"{_told(trace, trace.unwritten)}, and the engine has no checkpoint to show that none should"
    own = checkpoint_trace(target, checkpoint)
    padding = {one.name: one.numel for one in own.untouched} | own.unwritten
    short = {name: count for name, count in trace.unwritten.items() if count > padding.get(name, 0)}
    if not short:
        return ""
    given = {weight.name for weight in trace.manifest.weights}
    absent = [name for name in _weights_into(own, next(iter(short))) if name not in given]
    lacked = f" by {absent[0]!r}, which the trainer lacks" if absent else ""
    return f"{_told(trace, short)}; the engine's own checkpoint fills them{lacked}"


def checkpoint_trace(
    target: Target, checkpoint: Mapping[str, Tensor], live: Container[str] | None = None
) -> LoaderTrace:
    """Return what an engine's loader does with the weights of the engine's own checkpoint; see ``trace_loader``."""
    views = [WeightView(name, tensor, tensor) for name, tensor in checkpoint.items()]
    return trace_loader(*target.meta_model(), describe(views, 1).manifest, live)


def _told(trace: LoaderTrace, short: dict[str, int]) -> str:
    name, count = next(iter(short.items()))
    numel = next(one.destination.numel for one in trace.not_plain if one.destination.name == name)
    rest = f" and others of {len(short) - 1} more tensors" if len(short) > 1 else ""
    return f"no weight reaches {count} of the {numel} elements of {name!r}{rest}"


def _weights_into(own: LoaderTrace, name: str) -> list[str]:
    """Return the names of the weights that are written to a destination."""
    numbers: set[int] = set()
    for written in own.written:
        if written.destination.name == name:
            numbers |= {write.origin.weight for write in written.writes if isinstance(write.origin, FromWeight)}
    for one in own.not_plain:
        if one.destination.name == name:
            numbers |= one.weights
    return [own.manifest.weights[number].name for number in sorted(numbers)]
