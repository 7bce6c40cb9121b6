"""A receiver's plan for one trainer: recorded, cut by the trainer's rows, and what of it is left to the engine."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.engines.weight_sync.endpoint import Place
from rlcore.engines.weight_sync.planning.coverage import lacking
from rlcore.engines.weight_sync.planning.dispatch_trace import Weighted
from rlcore.engines.weight_sync.planning.loader_trace import Destination, Recording, Write, Written, record
from rlcore.engines.weight_sync.planning.manifest import Manifest, dtype_of
from rlcore.engines.weight_sync.planning.plan import Plan, make_plan, misfits
from rlcore.engines.weight_sync.planning.self_test import prove
from rlcore.engines.weight_sync.planning.strided_copy import Copy, canonical
from rlcore.engines.weight_sync.target import Target
from rlcore.engines.weight_sync.transports.slabs import Piece, dense
from rlcore.errors import SyncError


class Planner:
    """Of one receiver, ``number`` among all. Raises SyncError where the weights are those of another model."""

    def __init__(self, target: Target, manifest: Manifest, senders: Sequence[Place], place: Place, number: int) -> None:
        self.manifest = manifest
        self._senders = list(senders)
        self._number = number
        self._own_ranks = [rank for rank, sender in enumerate(senders) if _is_near(sender, place)]
        self._recording = record(*target.meta_model(), manifest, live=target.tensors())
        if refusal := self._recording.refusal or lacking(self._recording, target):
            raise SyncError(f"the trainer's model is not the engine's, which still serves its old weights: {refusal}")
        written = [one.destination for one in self._recording.written]
        self._target = target
        self._excluded = misfits(written, target.tensors())
        self.plan = self._made(self._recording, self._excluded)
        self.is_proven = target.is_plain or not self.plan.pieces

    def serves(self, manifest: Manifest, senders: Sequence[Place], number: int) -> bool:
        """Whether it would be made the same again."""
        return (manifest.digest, list(senders), number) == (self.manifest.digest, self._senders, self._number)

    def _made(self, recording: Recording, excluded: dict[str, str]) -> Plan:
        return make_plan(recording, excluded=excluded, own_ranks=self._own_ranks, spread=self._number)

    def prove(self) -> None:
        """Leave to the engine's own loader what the plan gets wrong. Overwrites all that the plan writes."""
        wrong = prove(self.plan, self.manifest, self._target.tensors, self._target.reload)
        self._excluded |= wrong
        self.plan = self._made(self._recording, self._excluded)
        self.is_proven = True

    @property
    def fallback(self) -> list[str]:
        """Names of the weights that are given to the engine's own loader."""
        return [self.manifest.weights[number].name for number in self.plan.fallback_weights]

    @property
    def destination_names(self) -> list[str]:
        """Of the tensors that the plan writes."""
        return [destination.name for destination in self.plan.destinations]

    def needed_bytes(self) -> list[int]:
        """From each sender, in its dtypes."""
        found = [0] * len(self._senders)
        for piece in self.plan.pieces:
            found[piece.rank] += piece.copy.numel * dtype_of(self.manifest.parameters[piece.parameter].dtype).itemsize
        return found

    def pieces(self) -> list[list[Piece]]:
        """Of the plan, by sender."""
        return self._by_sender(self.plan)

    def _by_sender(self, plan: Plan) -> list[list[Piece]]:
        found: list[list[Piece]] = [[] for _ in range(len(self._senders))]
        for piece in plan.pieces:
            destination = plan.destinations[piece.destination]
            dtype = _narrower(self.manifest.parameters[piece.parameter].dtype, destination.dtype)
            found[piece.rank].append(Piece(piece.parameter, destination.name, dtype, piece.copy))
        return found

    def whole(self, weights: Sequence[int]) -> list[list[Piece]]:
        """Of a plan that brings these weights, by number, into tensors of their own."""
        views = [number for number in weights if self.manifest.weights[number].parameter is not None]
        found = self._by_sender(self._made(_recorded(self.manifest, views), {}))
        for number in weights:
            one = self.manifest.weights[number]
            if one.parameter is None:  # every rank has made it whole
                rank = self._own_ranks[0] if self._own_ranks else self._number % len(self._senders)
                copy = Copy(one.shape, 0, dense(one.shape), 0, dense(one.shape))
                found[rank].append(Piece(len(self.manifest.parameters) + number, one.name, one.dtype, copy))
        return found


def _is_near(sender: Place, place: Place) -> bool:
    if place.is_host:
        return sender.process == place.process
    return sender.device_uuid == place.device_uuid


def _narrower(first: str, second: str) -> str:
    """In which values travel: what is lost is lost at one end or the other."""
    return first if dtype_of(first).itemsize <= dtype_of(second).itemsize else second


def _recorded(manifest: Manifest, weights: Sequence[int]) -> Recording:
    """Of a loader that copies each of these weights into a tensor of its own."""
    written = []
    for number in weights:
        one = manifest.weights[number]
        copy = canonical(Copy(one.shape, one.offset, one.stride, 0, dense(one.shape)))
        origin = Weighted(number, (dtype_of(one.dtype),))
        written.append(
            Written(Destination(one.name, (), one.shape, dense(one.shape), one.dtype), [Write(copy, origin)])
        )
    return Recording(manifest, written, not_plain=[], untouched=[], failures={}, idle=frozenset())
