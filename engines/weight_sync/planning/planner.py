"""The planner: traces an engine's loader, cuts the trace by a trainer's boxes, and has the plan tested."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rlcore.engines.weight_sync.endpoint import EndpointInfo
from rlcore.engines.weight_sync.planning.buckets import BucketPiece
from rlcore.engines.weight_sync.planning.coverage import missing_part
from rlcore.engines.weight_sync.planning.dispatch_trace import FromWeight
from rlcore.engines.weight_sync.planning.loader_trace import Destination, LoaderTrace, Write, Written, trace_loader
from rlcore.engines.weight_sync.planning.manifest import WeightManifest, dtype_of
from rlcore.engines.weight_sync.planning.plan import Replicas, SyncPlan, make_plan, misfits, nearest_rank, replicas
from rlcore.engines.weight_sync.planning.plan_cache import PlanCache
from rlcore.engines.weight_sync.planning.quantized import Quantized, quantized_misfits
from rlcore.engines.weight_sync.planning.self_test import run_self_test
from rlcore.engines.weight_sync.planning.strided_copy import Copy, canonical, dense
from rlcore.engines.weight_sync.target import Target
from rlcore.errors import SyncError


class Planner:
    """Plans for one receiver.

    Args:
        target: what the receiver writes into.
        manifest: of the trainer.
        senders: the trainer's ranks.
        unreached: for each of them why its memory cannot be opened by the receiver, "" if it can.
        receiver: where the receiver is.
        number: the receiver's position among all.

    Raises:
        SyncError: the weights are those of another model.
    """

    def __init__(
        self,
        target: Target,
        manifest: WeightManifest,
        senders: Sequence[EndpointInfo],
        unreached: Sequence[str],
        *,
        receiver: EndpointInfo,
        number: int,
    ) -> None:
        self.manifest = manifest
        self._senders = list(senders)
        self._unreached = list(unreached)
        self._number = number
        self._distances = [_distance(one, receiver, not why) for one, why in zip(senders, unreached, strict=True)]
        self._target = target
        self._quantized: Quantized = {} if any(unreached) else target.quantized()
        self._cache = None if self._quantized else PlanCache.of(target, manifest, self._distances, number)
        kept = None if self._cache is None else self._cache.load(manifest, target.tensors())
        if kept is not None:
            self.plan, self.is_tested = kept, True
            return
        self._trace = trace_loader(*target.meta_model(), manifest, live=target.tensors())
        if refusal := self._trace.refusal or missing_part(self._trace, target):
            raise SyncError(f"the trainer's model is not the engine's, which still serves its old weights: {refusal}")
        written = [one.destination for one in self._trace.written if one.destination.name not in self._quantized]
        self._excluded = misfits(written, target.tensors())
        self.plan = self._make(self._trace, self._excluded)
        if wrong := quantized_misfits(self.plan, self._quantized):
            self._excluded |= wrong
            self.plan = self._make(self._trace, self._excluded)
        self.is_tested = target.is_plain or not self.plan.pieces

    def serves(
        self, manifest: WeightManifest, senders: Sequence[EndpointInfo], unreached: Sequence[str], number: int
    ) -> bool:
        """Return True if a planner of these would be the same."""
        own = self.manifest.digest, self._senders, self._unreached, self._number
        return own == (manifest.digest, list(senders), list(unreached), number)

    @property
    def are_reached(self) -> list[bool]:
        """For each sender True if the receiver can open its memory."""
        return [not why for why in self._unreached]

    @property
    def unreached(self) -> str:
        """The reason why some parts are with senders alone that the receiver does not reach; "" if there are none."""
        everywhere = Replicas((0, 0), list(range(len(self._senders))))  # of weights that every rank computes
        for held in [everywhere, *itertools.chain.from_iterable(map(replicas, self.manifest.layouts))]:
            if all(self._unreached[rank] for rank in held.ranks):
                return f"the trainer's rank {held.ranks[0]}: {self._unreached[held.ranks[0]]}"
        return ""

    @property
    def unreadable(self) -> str:
        """The reason why what was sent cannot be read back of some tensor, to the bit; "" if it can."""
        if quantized := self.quantized:
            return f"{next(iter(quantized))} is quantised in the engine"
        parameters, destinations = self.manifest.parameters, self.plan.destinations
        kinds = {
            (parameters[piece.parameter].dtype, destinations[piece.destination].dtype): piece.destination
            for piece in self.plan.pieces
        }
        for (given, dtype), destination in kinds.items():
            travels_as = _narrower(given, dtype)
            if not _holds(dtype, travels_as):
                return f"{destinations[destination].name} is {dtype}, and its values travel as {travels_as}"
        return ""

    def _make(self, trace: LoaderTrace, excluded: dict[str, str]) -> SyncPlan:
        return make_plan(trace, excluded=excluded, distances=self._distances, spread=self._number)

    def run_self_test(self) -> None:
        """Leave to the engine's own loader what the plan gets wrong. Overwrites all that the plan writes.

        A plan that an earlier program has tested is not tested again, though others in this round are.
        """
        if self.is_tested:
            return
        wrong = run_self_test(
            self.plan, self.manifest, self._target.tensors, self._target.reload, self._target.quantized
        )
        if wrong:
            self._excluded |= wrong
            self.plan = self._make(self._trace, self._excluded)
        self.is_tested = True
        if self._cache is not None:
            self._cache.store(self.plan)

    @property
    def fallback(self) -> list[str]:
        """Names of the weights that are given to the engine's own loader."""
        return [self.manifest.weights[number].name for number in self.plan.fallback_weights]

    @property
    def destination_names(self) -> list[str]:
        """Names of the tensors that the plan writes."""
        return [destination.name for destination in self.plan.destinations]

    @property
    def quantized(self) -> frozenset[str]:
        """Names of the plan's destinations that are quantised on the way."""
        if not self._quantized:  # no need to name all destinations, which are many
            return frozenset()
        return frozenset(self._quantized).intersection(self.destination_names)

    def needed_bytes(self) -> list[int]:
        """Return the bytes from each sender, in its dtypes."""
        found = [0] * len(self._senders)
        for piece in self.plan.pieces:
            found[piece.rank] += piece.copy.numel * dtype_of(self.manifest.parameters[piece.parameter].dtype).itemsize
        return found

    def pieces(self) -> list[list[BucketPiece]]:
        """Return the plan's pieces by sender."""
        return self._by_sender(self.plan)

    def _by_sender(self, plan: SyncPlan) -> list[list[BucketPiece]]:
        found: list[list[BucketPiece]] = [[] for _ in range(len(self._senders))]
        for piece in plan.pieces:
            destination = plan.destinations[piece.destination]
            dtype = _narrower(self.manifest.parameters[piece.parameter].dtype, destination.dtype)
            found[piece.rank].append(BucketPiece(piece.parameter, destination.name, dtype, piece.copy))
        return found

    def whole(self, weights: Sequence[int]) -> list[list[BucketPiece]]:
        """Return the pieces, by sender, that bring these weights, by number, into tensors of their own."""
        views = [number for number in weights if self.manifest.weights[number].parameter is not None]
        found = self._by_sender(self._make(_whole_weights(self.manifest, views), {}))
        for number in weights:
            one = self.manifest.weights[number]
            if one.parameter is None:  # every rank has made it whole
                rank = nearest_rank(range(len(self._senders)), self._distances, self._number)
                copy = Copy(one.shape, 0, dense(one.shape), 0, dense(one.shape))
                found[rank].append(BucketPiece(len(self.manifest.parameters) + number, one.name, one.dtype, copy))
        return found


def _distance(sender: EndpointInfo, receiver: EndpointInfo, is_reached: bool) -> int:
    """Return 0 for the receiver's own device, and more the slower the way is: to memory, on one machine, to another."""
    is_own = sender.process == receiver.process if receiver.is_host else sender.device_uuid == receiver.device_uuid
    if is_reached:
        return 0 if is_own else 1
    return 2 if sender.machine == receiver.machine else 3


def _narrower(first: str, second: str) -> str:
    """Return the dtype in which values travel: they are rounded at one end or the other anyway."""
    return first if dtype_of(first).itemsize <= dtype_of(second).itemsize else second


def _holds(dtype: str, values: str) -> bool:
    """Return True if a tensor of ``dtype`` gives back the bits of values of another dtype."""
    own, given = dtype_of(dtype), dtype_of(values)
    are_floats = own.is_floating_point and given.is_floating_point
    return own == given or (are_floats and given.itemsize < own.itemsize)


def _whole_weights(manifest: WeightManifest, weights: Sequence[int]) -> LoaderTrace:
    """Return the trace of a loader that copies each of these weights into a tensor of its own."""
    written = []
    for number in weights:
        one = manifest.weights[number]
        copy = canonical(Copy(one.shape, one.offset, one.stride, 0, dense(one.shape)))
        origin = FromWeight(number, (dtype_of(one.dtype),))
        written.append(
            Written(Destination(one.name, (), one.shape, dense(one.shape), one.dtype), [Write(copy, origin)])
        )
    return LoaderTrace(manifest, written, not_plain=[], untouched=[], failures={}, idle=frozenset())
