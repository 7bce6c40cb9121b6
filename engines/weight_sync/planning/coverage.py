"""Whether weights that fill an engine's tensors in part are all that it needs.

A part of a fused tensor that the trainer does not have looks like padding that no weight reaches. The engine's own
checkpoint tells them apart: padding is what it leaves unwritten too.
"""

from __future__ import annotations

from rlcore.engines.weight_sync.planning.dispatch_trace import Weighted
from rlcore.engines.weight_sync.planning.loader_trace import Recording, record
from rlcore.engines.weight_sync.planning.manifest import describe
from rlcore.engines.weight_sync.target import Target
from rlcore.weights.view import WeightView


def lacking(recording: Recording, target: Target) -> str:
    """What of a tensor that some weights reach no weight fills, though the engine's own do; or ""."""
    if not recording.unwritten:
        return ""
    checkpoint = target.checkpoint()
    if checkpoint is None:
        if recording.failures:  # it may be these that would fill the rest
            return ""
        return f"{_told(recording, recording.unwritten)}, and the engine has no checkpoint to show that none should"
    views = [WeightView(name, tensor, tensor) for name, tensor in checkpoint.items()]
    own = record(*target.meta_model(), describe(views, 1).manifest)
    padding = {one.name: one.numel for one in own.untouched} | own.unwritten
    short = {name: count for name, count in recording.unwritten.items() if count > padding.get(name, 0)}
    if not short:
        return ""
    given = {weight.name for weight in recording.manifest.weights}
    absent = [name for name in _reaching(own, next(iter(short))) if name not in given]
    lacked = f" by {absent[0]!r}, which the trainer lacks" if absent else ""
    return f"{_told(recording, short)}; the engine's own checkpoint fills them{lacked}"


def _told(recording: Recording, short: dict[str, int]) -> str:
    name, count = next(iter(short.items()))
    numel = next(one.destination.numel for one in recording.not_plain if one.destination.name == name)
    rest = f" and others of {len(short) - 1} more tensors" if len(short) > 1 else ""
    return f"no weight reaches {count} of the {numel} elements of {name!r}{rest}"


def _reaching(own: Recording, name: str) -> list[str]:
    """Names of the weights that reach a destination."""
    numbers: set[int] = set()
    for written in own.written:
        if written.destination.name == name:
            numbers |= {write.origin.weight for write in written.writes if isinstance(write.origin, Weighted)}
    for one in own.not_plain:
        if one.destination.name == name:
            numbers |= one.weights
    return [own.manifest.weights[number].name for number in sorted(numbers)]
