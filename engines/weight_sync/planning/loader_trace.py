"""What an engine's own loader does to each weight, found by watching it load meta tensors into a meta model.

The loader of a second instance of the model is given meta tensors that lie in their parameters as the trainer's weights
do. What it copies is known exactly. A tensor to which something else is done, or not all of which is written, is "not
plain", with the reason: its bytes are left to the loader itself.
"""

from __future__ import annotations

import contextlib
import gc
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
    LoadWeights,
    Memory,
    Origin,
    Recorder,
    Weighted,
    failure_text,
    offset_of,
    storage_key,
    weights_of,
)
from rlcore.engines.weight_sync.planning.manifest import Manifest, dtype_of
from rlcore.engines.weight_sync.planning.strided_copy import Copy, cut, span, visible
from rlcore.engines.weight_sync.planning.strided_layout import NotNestedError
from rlcore.tensor_data import dtype_name

_FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


class Destination(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor of the engine's model."""

    name: str
    aliases: tuple[str, ...]
    """Other names in the same memory, such as that of a tied head."""
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
    """Elements of a destination that are always copied from the same place, or have always the same value."""

    copy: Copy
    """From the elements of the weight's parameter, to those of the destination from its first."""
    origin: Weighted | Constant


class Written(NamedTuple):
    """A destination that is written by copies alone, each element once."""

    destination: Destination
    writes: list[Write]


class NotPlain(NamedTuple):
    """A destination that the loader itself has to write."""

    destination: Destination
    reason: str
    weights: frozenset[int]
    """All that reach it."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What one load of all weights of a manifest does."""

    manifest: Manifest
    written: list[Written]
    not_plain: list[NotPlain]
    untouched: list[Destination]
    """No weight reaches them: caches, scales, parts that the trainer does not have."""
    failures: dict[int, str]
    """Weights for which the loader raised, and what; -1: with none in its hands."""
    idle: frozenset[int]
    """Weights that reach nothing, such as experts of other workers."""
    unwritten: dict[str, int] = field(default_factory=dict)
    """How many elements no weight wrote, of each destination that some weight reaches, or would if none had failed."""
    refusal: str = ""
    """Why these are the weights of another model, so that no load of them can be complete; or ""."""


def record(
    model: nn.Module, load_weights: LoadWeights, manifest: Manifest, live: Container[str] | None = None
) -> Recording:
    """Give ``load_weights`` all weights of the manifest on meta, and say what it does to ``model``.

    Args:
        model: on meta; never the one that serves.
        load_weights: the engine's own loader of ``model``.
        live: names of the tensors that the serving model has after its loading; None: all that ``model`` has. Engines
            drop placeholders, such as those of scales that a checkpoint may have, and nobody misses a weight for them.

    Raises:
        SyncError: the loader says so: these are the weights of another model.
    """
    before = _named_tensors(model)
    recorder = Recorder(manifest)
    for tensor in before.values():
        recorder.watch(tensor)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False) if live is None or name in live}
    with _no_collection(), torch.no_grad(), recorder:
        recorder.feed(load_weights)
    recording = _Reader(recorder, _named_tensors(model), manifest).recording(before)
    refusal = _refused(load_weights, manifest, recorder.failures) or _missed(recording.untouched, parameters)
    return replace(recording, refusal=refusal)


@torch.no_grad()
def _refused(load_weights: LoadWeights, manifest: Manifest, failures: dict[int, str]) -> str:
    """A weight that the loader takes no better when it has values, so that it is not meta that it objects to."""
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


def _missed(untouched: list[Destination], parameters: set[str]) -> str:
    missed = [one.name for one in untouched if not parameters.isdisjoint((one.name, *one.aliases))]
    if not missed:
        return ""
    rest = f" and {len(missed) - 1} more parameters" if len(missed) > 1 else ""
    return f"no weight reaches {missed[0]!r}{rest}"


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """What is recorded is kept, and looking through it again and again for garbage is a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named if not is_lazy(tensor)}


class _Place(NamedTuple):
    """A tensor in its storage."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Place:
        return cls(offset_of(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def span(self) -> tuple[int, int]:
        return span(self.offset, self.shape, self.stride)


class _Reader:
    """Sorts the destinations of a finished load."""

    def __init__(self, recorder: Recorder, after: dict[str, Tensor], manifest: Manifest) -> None:
        self._recorder = recorder
        self._after = after
        self._result = Recording(manifest, [], [], [], recorder.failures, frozenset())
        self._reached: set[int] = set()

    def recording(self, before: dict[str, Tensor]) -> Recording:
        by_storage: dict[int, dict[str, Tensor]] = {}
        for name, tensor in before.items():
            if tensor.numel():
                by_storage.setdefault(storage_key(tensor), {})[name] = tensor
        for key, named in by_storage.items():
            for place, names in _distinct(named):
                self._sort(self._recorder.memories[key], place, names)
        for name in self._after.keys() - before.keys():
            self._created(name, self._after[name])
        num_weights = len(self._result.manifest.weights)
        idle = frozenset(range(num_weights)) - self._reached
        result = self._result
        return replace(result, idle=idle)

    def _sort(self, memory: Memory, place: _Place, names: list[str]) -> None:
        destination = Destination(names[0], tuple(names[1:]), place.shape, place.stride, dtype_name(place.dtype))
        weights = frozenset(memory.weights)
        found: list[Write] | str
        if reason := self._replaced(memory, place, names):
            found = reason
            weights |= frozenset(
                weight for name in names if name in self._after for weight in self._weights_in(self._after[name])
            )
        else:
            found = self._writes(memory, place, names[0])
        self._reached |= weights
        if isinstance(found, str):
            self._result.not_plain.append(NotPlain(destination, found, weights))
        elif found:
            self._result.written.append(Written(destination, found))
        elif self._recorder.failures:
            reason = "no weight reached it, and " + next(iter(self._recorder.failures.values()))
            self._result.not_plain.append(NotPlain(destination, reason, weights))
        else:
            self._result.untouched.append(destination)

    def _created(self, name: str, tensor: Tensor) -> None:
        place = _Place.of(tensor)
        destination = Destination(name, (), place.shape, place.stride, dtype_name(place.dtype))
        weights = frozenset(self._weights_in(tensor))
        self._reached |= weights
        self._result.not_plain.append(NotPlain(destination, "its loader makes it", weights))

    def _weights_in(self, tensor: Tensor) -> set[int]:
        memory = self._recorder.memories.get(storage_key(tensor))
        return memory.weights if memory else set()

    def _replaced(self, memory: Memory, place: _Place, names: list[str]) -> str:
        for name in names:
            now = self._after.get(name)
            if now is None:
                return "its loader takes it away"
            if storage_key(now) != memory.owner._cdata or now.numel() == 0:
                return "its loader puts another tensor in its place"
            if len(names) == 1 and _Place.of(now) != place:
                return "its loader changes its shape"
        return ""

    def _writes(self, memory: Memory, place: _Place, name: str) -> list[Write] | str:
        """What is written within a place, or why that is not plain."""
        try:
            found = list(_within(visible(memory.writes), place))
        except NotNestedError as error:
            return f"it is written by {error}"
        if memory.dtype != place.dtype and memory.writes:
            return f"its memory is written as {dtype_name(memory.dtype)}"
        numel = torch.Size(place.shape).numel()
        missing = numel - sum(copy.numel for copy, _ in found)
        if missing and (found or self._recorder.failures):
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
        for weight in weights_of(origin) & self._recorder.failures.keys():
            return self._recorder.failures[weight]
        if isinstance(origin, Weighted) and not is_one_cast(origin.dtypes):
            return "it is rounded on the way: " + " to ".join(map(dtype_name, origin.dtypes))
        return ""


def _distinct(named: dict[str, Tensor]) -> Iterator[tuple[_Place, list[str]]]:
    """The tensors of one storage, with the names of all that lie within each."""
    ordered = sorted(named.items(), key=lambda item: (item[1].storage_offset(), -item[1].numel()))
    place, names = _Place.of(ordered[0][1]), [ordered[0][0]]
    for name, tensor in ordered[1:]:
        other = _Place.of(tensor)
        if other.span[1] <= place.span[1]:
            names.append(name)
        else:
            yield place, names
            place, names = other, [name]
    yield place, names


def _within(writes: list[tuple[Copy, Origin]], place: _Place) -> Iterator[tuple[Copy, Origin]]:
    """The parts of writes in a place, in elements from its first."""
    first, end = place.span
    for copy, origin in writes:
        shape, source_offset, source_stride, offset, stride = copy
        for part in cut(Copy(shape, offset, stride, source_offset, source_stride), first, end):
            yield Copy(part.shape, part.offset, part.stride, part.source_offset - first, part.source_stride), origin


def is_one_cast(dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether values that go through these dtypes are those cast from the first to the last at once."""
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
