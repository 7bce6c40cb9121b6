"""The plan of one worker of an engine: which elements of which trainer rank go where.

It is the loader trace, cut by the boxes of the ranks, most of which are rows:

    trainer: parameters, by rows    loader trace                       plan: pieces
    rank 0: rows [0, 6)  ----+      weight q: rows [0, 4) -> qkv[0:4]      rank 0: q rows [0, 4)  -> qkv[0:4]
    rank 1: rows [6, 12) ----+      weight k: rows [4, 8) -> qkv[4:8]      rank 0: k rows [4, 6)  -> qkv[4:6]
                                                                           rank 1: k rows [6, 8)  -> qkv[6:8]

Every element of a destination in ``destinations`` is in one piece or one fill. All others are written by the engine's
own loader (``fallback``), which is given ``fallback_weights``, or are not the trainer's (``untouched``).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import msgspec
from torch import Tensor

from rlcore.engines.weight_sync.messages import Message
from rlcore.engines.weight_sync.planning.dispatch_trace import Constant
from rlcore.engines.weight_sync.planning.loader_trace import Destination, LoaderTrace, NotPlain, Write
from rlcore.engines.weight_sync.planning.manifest import Parameter, WeightManifest, dtype_of
from rlcore.engines.weight_sync.planning.no_collection import no_collection
from rlcore.engines.weight_sync.planning.strided_copy import Copy, coalesce, taken_from
from rlcore.errors import SyncError
from rlcore.tensor_data import dtype_name
from rlcore.weights.shards import Bounds


class PlanPiece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Elements of one rank's part of a parameter, and where they go."""

    rank: int
    parameter: int
    destination: int
    """Index in ``SyncPlan.destinations``."""
    shape: tuple[int, ...]
    source_offset: int
    """In elements, from the first of the rank's box."""
    source_stride: tuple[int, ...]
    offset: int
    """In elements, from the destination's first."""
    stride: tuple[int, ...]

    @property
    def copy(self) -> Copy:
        return Copy(self.shape, self.source_offset, self.source_stride, self.offset, self.stride)


class Fill(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Elements of a destination that are the same whatever the weights are, such as padding."""

    destination: int
    value: float
    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]


class Fallback(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A destination that the engine's own loader writes."""

    destination: Destination
    reason: str
    weights: tuple[int, ...]
    """Numbers of all weights that are loaded into it."""


class SyncPlan(Message, frozen=True):
    """All that is written into one worker of an engine; its digest names it in the messages of a round."""

    label: ClassVar[str] = "Plan"

    manifest_digest: str
    """The weights that it was made for: plans for others have another digest."""
    destinations: tuple[Destination, ...]
    pieces: tuple[PlanPiece, ...]
    """By rank, then by parameter."""
    fills: tuple[Fill, ...]
    fallback: tuple[Fallback, ...]
    fallback_weights: tuple[int, ...]
    """Numbers of the weights that the engine's loader is given, in the manifest's order."""
    fallback_bytes: int
    """Bytes of these weights, in the trainer's dtypes."""
    needed_bytes: int
    """Bytes of all pieces, in the trainer's dtypes."""
    untouched: tuple[Destination, ...]

    def by_destination(self) -> dict[int, list[PlanPiece]]:
        """Return the pieces of each destination that has some, by its index."""
        found: dict[int, list[PlanPiece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.destination, []).append(piece)
        return found

    def fill(self, live: Mapping[str, Tensor]) -> None:
        """Write the constants into the live tensors."""
        for one in self.fills:
            tensor = live[self.destinations[one.destination].name]
            tensor.as_strided(one.shape, one.stride, int(tensor.storage_offset()) + one.offset).fill_(one.value)


def misfits(destinations: Iterable[Destination], live: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the destinations whose live tensors are not as in the trace, and how they differ."""
    found: dict[str, str] = {}
    by_address: dict[int, str] = {}
    for destination in destinations:
        tensor = live.get(destination.name)
        if tensor is None:
            found[destination.name] = "the engine has no such tensor"
            continue
        wanted = destination.shape, destination.stride, destination.dtype
        given = tuple(tensor.shape), tensor.stride(), dtype_name(tensor.dtype)
        if given != wanted:
            found[destination.name] = f"it is {_layout(*given)} in the engine and {_layout(*wanted)} in its loader"
        other = by_address.setdefault(tensor.data_ptr(), destination.name)
        if other != destination.name and tensor.numel():
            reason = f"{other} and {destination.name} are one memory in the engine and two in its loader"
            found[other] = found[destination.name] = reason
    return found


def _layout(shape: Sequence[int], stride: Sequence[int], dtype: str) -> str:
    return f"{dtype} {list(shape)} with strides {list(stride)}"


@no_collection()
def make_plan(
    trace: LoaderTrace,
    *,
    excluded: Mapping[str, str] | None = None,
    distances: Sequence[int] = (),
    spread: int = 0,
) -> SyncPlan:
    """Cut a loader trace by the box that each rank has.

    Args:
        excluded: destinations to leave to the engine's loader, and why.
        distances: of each rank from the receiver. Of replicas the nearest is chosen: 0 is the receiver's own device.
        spread: number of the receiver, so that receivers take from different replicas.

    Raises:
        SyncError: no rank has some of the elements.
    """
    manifest = trace.manifest
    fallen = _fallen(trace, excluded or {})
    fallen_names = {one.destination.name for one in fallen}
    plain = [one for one in trace.written if one.destination.name not in fallen_names]
    cutter = _Cutter(manifest, distances, spread)
    pieces: list[PlanPiece] = []
    fills: list[Fill] = []
    for number, written in enumerate(plain):
        fills += _fills(number, written.writes)
        for parameter, copies in _by_parameter(manifest, written.writes).items():
            for copy in coalesce(copies):
                pieces += cutter.pieces(number, parameter, copy)
    pieces.sort(key=lambda piece: (piece.rank, piece.parameter, piece.destination, piece.offset))
    lost = trace.failures.keys() - {-1} | (trace.idle if trace.failures else frozenset())
    given = sorted(lost.union(*(one.weights for one in fallen)))
    itemsizes = [dtype_of(parameter.dtype).itemsize for parameter in manifest.parameters]
    return SyncPlan(
        manifest_digest=manifest.digest,
        destinations=tuple(one.destination for one in plain),
        pieces=tuple(pieces),
        fills=tuple(fills),
        fallback=tuple(Fallback(one.destination, one.reason, tuple(sorted(one.weights))) for one in fallen),
        fallback_weights=tuple(given),
        fallback_bytes=sum(manifest.weights[weight].nbytes for weight in given),
        needed_bytes=sum(piece.copy.numel * itemsizes[piece.parameter] for piece in pieces),
        untouched=tuple(trace.untouched),
    )


def _by_parameter(manifest: WeightManifest, writes: Iterable[Write]) -> dict[int, list[Copy]]:
    found: dict[int, list[Copy]] = defaultdict(list)
    for copy, origin in writes:
        if not isinstance(origin, Constant):
            parameter = manifest.weights[origin.weight].parameter
            assert parameter is not None
            found[parameter].append(copy)
    return found


def _fills(number: int, writes: Iterable[Write]) -> list[Fill]:
    found: dict[float, list[Copy]] = defaultdict(list)
    for copy, origin in writes:
        if isinstance(origin, Constant):
            found[origin.value].append(copy)
    return [
        Fill(number, value, copy.shape, copy.offset, copy.stride)
        for value, copies in found.items()
        for copy in coalesce(copies)
    ]


# --------------------------------------------------------------------------------------------- what falls back


def _fallen(trace: LoaderTrace, excluded: Mapping[str, str]) -> list[NotPlain]:
    """Return the destinations that the loader itself must write.

    Engines load and post-process a module at a time. So all of a module falls back, and so does every module that
    shares a weight with it.
    """
    fallen = list(trace.not_plain)
    plain: list[NotPlain] = []
    for written in trace.written:
        weights = frozenset(write.origin.weight for write in written.writes if not isinstance(write.origin, Constant))
        candidate = NotPlain(written.destination, excluded.get(written.destination.name, ""), weights)
        (fallen if candidate.reason else plain).append(candidate)
    news = fallen
    while news:
        modules = {module: one.destination.name for one in news for module in _modules(one.destination)}
        causes = {weight: one.destination.name for one in news for weight in one.weights}
        news, rest = [], []
        for one in plain:
            cause = next((modules[module] for module in _modules(one.destination) if module in modules), None)
            if cause is None:
                cause = next((causes[weight] for weight in one.weights if weight in causes), None)
            if cause is None:
                rest.append(one)
            else:
                news.append(one._replace(reason=f"it is loaded together with {cause}, which is not plain"))
        fallen += news
        plain = rest
    return fallen


def _modules(destination: Destination) -> set[str]:
    """Return the names of the modules that own it; none for a parameter of the model itself."""
    return {name.rpartition(".")[0] for name in (destination.name, *destination.aliases)} - {""}


# ------------------------------------------------------------------------------------------------------- ranks


class Replicas(NamedTuple):
    """Ranks that have the same box of a parameter."""

    box: Bounds
    ranks: list[int]


class _Cut(NamedTuple):
    holders: Replicas
    copy: Copy
    """The copy; its source is counted within the holders' box."""


class _Cutter:
    """Cuts copies by boxes. Copies that differ only in where they go are cut once, such as those of experts."""

    def __init__(self, manifest: WeightManifest, distances: Sequence[int], spread: int) -> None:
        self._manifest = manifest
        self._distances = distances
        self._spread = spread
        self._cuts = functools.cache(self._cut)

    def pieces(self, destination: int, parameter: int, copy: Copy) -> list[PlanPiece]:
        described = self._manifest.parameters[parameter]
        return [
            PlanPiece(
                nearest_rank(holders.ranks, self._distances, parameter + self._spread),
                parameter,
                destination,
                part.shape,
                part.source_offset,
                part.source_stride,
                part.offset + copy.offset,
                part.stride,
            )
            for holders, part in self._cuts(copy._replace(offset=0), described.shape, described.layout)
        ]

    def _cut(self, copy: Copy, shape: tuple[int, ...], layout: int) -> list[_Cut]:
        parameter = Parameter(shape, "", layout)
        found = []
        for holders in replicas(self._manifest.layouts[layout]):
            found += [_Cut(holders, part) for part in taken_from(parameter.held(holders.box), copy)]
        if missing := copy.numel - sum(part.copy.numel for part in found):
            raise SyncError(
                f"no trainer rank holds {missing} elements of a parameter of shape {list(shape)}, whose parts are held "
                f"as {list(self._manifest.layouts[layout])}. The manifest is not of one trainer."
            )
        return found


def nearest_rank(ranks: Sequence[int], distances: Sequence[int], turn: int) -> int:
    """Return the rank that gives what all of ``ranks`` have: the nearest, and of several as near one by turns.

    Args:
        distances: of every rank; without any all are as near.
    """
    if not distances:
        return ranks[turn % len(ranks)]
    least = min(distances[rank] for rank in ranks)
    nearest = [rank for rank in ranks if distances[rank] == least]
    return nearest[0] if least == 0 else nearest[turn % len(nearest)]


@functools.lru_cache(4096)
def replicas(layout: tuple[Bounds, ...]) -> list[Replicas]:
    """Return the ranks of each box that is not empty."""
    by_box: dict[Bounds, list[int]] = defaultdict(list)
    for rank, box in enumerate(layout):
        if all(first < end for first, end in zip(box[::2], box[1::2], strict=True)):
            by_box[box].append(rank)
    return [Replicas(box, ranks) for box, ranks in sorted(by_box.items())]
