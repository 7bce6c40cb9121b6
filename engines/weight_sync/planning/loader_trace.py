"""The loader trace: what an engine's own loader does to each weight, seen as it loads meta tensors into a meta model.

The loader of a second instance of the model is given meta tensors that lie in their parameters as the trainer's weights
do. What it copies is known exactly. A tensor is "not plain" if something else is done to it, or if it is written in
part; it has the reason, and its bytes are left to the loader itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rlcore.engines.weight_sync.planning.dispatch_trace import (
    Changed,
    Constant,
    FromWeight,
    LoaderTracer,
    LoadWeights,
    Origin,
    StorageTrace,
    failure_text,
    offset_of,
    weights_of,
)
from rlcore.engines.weight_sync.planning.manifest import WeightManifest, dtype_of
from rlcore.engines.weight_sync.planning.no_collection import no_collection
from rlcore.engines.weight_sync.planning.strided_copy import Copy, cut, span, visible
from rlcore.engines.weight_sync.planning.strided_layout import NotNestedError
from rlcore.tensor_data import dtype_name
from rlcore.weights.dispatch_tracer import storage_key

_FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


class Destination(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor of the engine's model."""

    name: str
    aliases: tuple[str, ...]
    """Other names in the same storage, such as that of a tied head."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * dtype_of(self.dtype).itemsize


class Write(NamedTuple):
    """Elements of a destination that are always copied from the same elements, or always have the same value."""

    copy: Copy
    """From elements of the weight's parameter to elements of the destination, counted from its first."""
    origin: FromWeight | Constant


class Written(NamedTuple):
    """A destination that is written by copies alone, each element once."""

    destination: Destination
    writes: list[Write]


class NotPlain(NamedTuple):
    """A destination that the loader itself has to write."""

    destination: Destination
    reason: str
    weights: frozenset[int]
    """Numbers of all weights that something in it depends on."""


@dataclass(frozen=True, slots=True)
class LoaderTrace:
    """The effects of one load of all weights of a manifest."""

    manifest: WeightManifest
    written: list[Written]
    not_plain: list[NotPlain]
    untouched: list[Destination]
    """Destinations that no weight is written to: caches, scales, parts that the trainer does not have."""
    failures: dict[int, str]
    """Numbers of the weights for which the loader raised, and what it raised; -1 where it had taken none."""
    idle: frozenset[int]
    """Weights that are written nowhere, such as experts of other workers."""
    unwritten: dict[str, int] = field(default_factory=dict)
    """How many elements no weight wrote, for each destination that is written in part, or might be but for failures."""
    refusal: str = ""
    """The reason why these are the weights of another model, so that no load of them can be complete; or ""."""


@no_collection()
def trace_loader(
    model: nn.Module, load_weights: LoadWeights, manifest: WeightManifest, live: Container[str] | None = None
) -> LoaderTrace:
    """Give ``load_weights`` all weights of the manifest on meta, and return what it does to ``model``.

    Args:
        model: on meta; never the one that serves.
        load_weights: the engine's own loader of ``model``.
        live: names of the tensors that the serving model has after loading; None: all that ``model`` has. Engines drop
            placeholders after loading, such as those of scales that some checkpoints have: they need no weight.

    Raises:
        SyncError: the loader raised it: these are the weights of another model.
    """
    before = _named_tensors(model)
    tracer = LoaderTracer(manifest)
    for tensor in before.values():
        tracer.watch(tensor)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False) if live is None or name in live}
    with torch.no_grad(), tracer:
        tracer.feed(load_weights)
    trace = _TraceReader(tracer, _named_tensors(model), manifest).trace(before)
    refusal = _refused(load_weights, manifest, tracer.failures) or _unreached_parameter(trace.untouched, parameters)
    return replace(trace, refusal=refusal)


@torch.no_grad()
def _refused(load_weights: LoadWeights, manifest: WeightManifest, failures: dict[int, str]) -> str:
    """Name a weight that the loader refuses also when it has values, so that meta is not its reason; or ""."""
    for number, failure in failures.items():
        if number < 0 or "meta" in failure.lower():
            continue
        weight = manifest.weights[number]
        try:
            load_weights([(weight.name, torch.zeros(weight.shape, dtype=dtype_of(weight.dtype)))])
        except Exception as error:
            found = failure_text(error)
            if found.partition(":")[0] == failure.partition(":")[0]:  # of one kind; devices word them differently
                return f"{found}, for the weight {weight.name!r} of shape {list(weight.shape)}"
    return ""


def _unreached_parameter(untouched: list[Destination], parameters: set[str]) -> str:
    missed = [one.name for one in untouched if not parameters.isdisjoint((one.name, *one.aliases))]
    if not missed:
        return ""
    rest = f" and {len(missed) - 1} more parameters" if len(missed) > 1 else ""
    return f"no weight reaches {missed[0]!r}{rest}"


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named if not is_lazy(tensor)}


class _TensorLayout(NamedTuple):
    """The position of a tensor in its storage, in elements."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorLayout:
        return cls(offset_of(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def span(self) -> tuple[int, int]:
        return span(self.offset, self.shape, self.stride)


class _TraceReader:
    """Sorts the destinations of a finished load into written, not plain and untouched."""

    def __init__(self, tracer: LoaderTracer, after: dict[str, Tensor], manifest: WeightManifest) -> None:
        self._tracer = tracer
        self._after = after
        self._result = LoaderTrace(manifest, [], [], [], tracer.failures, frozenset())
        self._reached: set[int] = set()

    def trace(self, before: dict[str, Tensor]) -> LoaderTrace:
        by_storage: dict[int, dict[str, Tensor]] = {}
        for name, tensor in before.items():
            if tensor.numel():
                by_storage.setdefault(storage_key(tensor), {})[name] = tensor
        for key, named in by_storage.items():
            for layout, names in _distinct(named):
                self._sort(self._tracer.storages[key], layout, names)
        for name in self._after.keys() - before.keys():
            self._created(name, self._after[name])
        num_weights = len(self._result.manifest.weights)
        idle = frozenset(range(num_weights)) - self._reached
        result = self._result
        return replace(result, idle=idle)

    def _sort(self, storage: StorageTrace, layout: _TensorLayout, names: list[str]) -> None:
        destination = Destination(names[0], tuple(names[1:]), layout.shape, layout.stride, dtype_name(layout.dtype))
        weights = frozenset(storage.weights)
        found: list[Write] | str
        if reason := self._replaced(storage, layout, names):
            found = reason
            weights |= frozenset(
                weight for name in names if name in self._after for weight in self._weights_in(self._after[name])
            )
        else:
            found = self._writes(storage, layout, names[0])
        self._reached |= weights
        if isinstance(found, str):
            self._result.not_plain.append(NotPlain(destination, found, weights))
        elif found:
            self._result.written.append(Written(destination, found))
        elif self._tracer.failures:
            reason = "no weight reached it, and " + next(iter(self._tracer.failures.values()))
            self._result.not_plain.append(NotPlain(destination, reason, weights))
        else:
            self._result.untouched.append(destination)

    def _created(self, name: str, tensor: Tensor) -> None:
        layout = _TensorLayout.of(tensor)
        destination = Destination(name, (), layout.shape, layout.stride, dtype_name(layout.dtype))
        weights = frozenset(self._weights_in(tensor))
        self._reached |= weights
        self._result.not_plain.append(NotPlain(destination, "its loader makes it", weights))

    def _weights_in(self, tensor: Tensor) -> set[int]:
        storage = self._tracer.storages.get(storage_key(tensor))
        return storage.weights if storage else set()

    def _replaced(self, storage: StorageTrace, layout: _TensorLayout, names: list[str]) -> str:
        for name in names:
            now = self._after.get(name)
            if now is None:
                return "its loader takes it away"
            if storage_key(now) != storage.key or now.numel() == 0:
                return "its loader puts another tensor in its place"
            if len(names) == 1 and _TensorLayout.of(now) != layout:
                return "its loader changes its shape"
        return ""

    def _writes(self, storage: StorageTrace, layout: _TensorLayout, name: str) -> list[Write] | str:
        """Return what is written to the tensor of a layout, or why that is not plain."""
        try:
            found = list(_within(visible(storage.writes), layout))
        except NotNestedError as error:
            return f"it is written by {error}"
        if storage.dtype != layout.dtype and storage.writes:
            return f"its memory is written as {dtype_name(storage.dtype)}"
        numel = torch.Size(layout.shape).numel()
        missing = numel - sum(copy.numel for copy, _ in found)
        if missing and (found or self._tracer.failures):
            self._result.unwritten[name] = missing
        writes = []
        for copy, origin in found:
            if reason := self._objection(origin):
                return reason
            assert not isinstance(origin, Changed)
            writes.append(Write(copy, origin))
        if writes and missing:
            return f"{missing} of its {numel} elements are written by no weight"
        return writes

    def _objection(self, origin: Origin) -> str:
        if isinstance(origin, Changed):
            return origin.reason
        for weight in weights_of(origin) & self._tracer.failures.keys():
            return self._tracer.failures[weight]
        if isinstance(origin, FromWeight) and not is_one_cast(origin.dtypes):
            return "it is rounded on the way: " + " to ".join(map(dtype_name, origin.dtypes))
        return ""


def _distinct(named: dict[str, Tensor]) -> Iterator[tuple[_TensorLayout, list[str]]]:
    """Yield the tensors of one storage that lie in no other, with the names of all that lie within each."""
    ordered = sorted(named.items(), key=lambda item: (item[1].storage_offset(), -item[1].numel()))
    layout, names = _TensorLayout.of(ordered[0][1]), [ordered[0][0]]
    for name, tensor in ordered[1:]:
        other = _TensorLayout.of(tensor)
        if other.span[1] <= layout.span[1]:
            names.append(name)
        else:
            yield layout, names
            layout, names = other, [name]
    yield layout, names


def _within(writes: list[tuple[Copy, Origin]], layout: _TensorLayout) -> Iterator[tuple[Copy, Origin]]:
    """Yield the parts of writes to the tensor of a layout, in elements from its first."""
    first, end = layout.span
    for copy, origin in writes:
        shape, source_offset, source_stride, offset, stride = copy
        for part in cut(Copy(shape, offset, stride, source_offset, source_stride), first, end):
            yield Copy(part.shape, part.offset, part.stride, part.source_offset - first, part.source_stride), origin


def is_one_cast(dtypes: tuple[torch.dtype, ...]) -> bool:
    """Return True if a cast through these dtypes gives the same values as one from the first to the last."""
    steps = [dtype for dtype, _ in itertools.groupby(dtypes)]
    if len(steps) <= 2:
        return True
    if not _FLOATS.issuperset(steps):
        return False
    held = steps[0]
    for dtype in steps[1:]:
        if torch.promote_types(held, dtype) != dtype:  # it rounds
            if dtype != steps[-1]:
                return False
            held = dtype
    return True
