"""The dispatch trace of a loader on the meta device: the origin of the elements of every tensor.

The tracer sees every operation. A copy from a weight, whatever views are taken on the way, is a strided copy
between two storages; through a temporary tensor it is two, which are composed. Anything else done to a value is a
change, which is named and stays with the value wherever it is written to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore._torch_private import COPY_TO
from rlcore.engines.weight_sync.planning.manifest import WeightManifest, dtype_of
from rlcore.engines.weight_sync.planning.strided_copy import Copy, compose, visible
from rlcore.engines.weight_sync.planning.strided_layout import NotNestedError
from rlcore.errors import SyncError
from rlcore.tensor_data import dtype_name
from rlcore.weights.dispatch_tracer import DispatchTracer, Handler, storage_key, tensors_in, written_tensors

_log = logging.getLogger(__name__)
_MAX_FAILURES = 256
"""A loader that fails for so many weights is not called again."""

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Any]


class FromWeight(NamedTuple):
    """The origin is a weight; the copy's source is the weight's parameter."""

    weight: int
    dtypes: tuple[torch.dtype, ...]
    """The dtypes that the values went through: the weight's own first, their present one last."""


class Constant(NamedTuple):
    """The origin is one value for all elements, whatever the weights are."""

    value: float


class Changed(NamedTuple):
    """The origin is more than a copy of ``weights``, for this reason."""

    reason: str
    weights: frozenset[int]


Origin = FromWeight | Constant | Changed


def weights_of(origin: Origin) -> frozenset[int]:
    """Return the numbers of the weights that an origin depends on."""
    if isinstance(origin, FromWeight):
        return frozenset((origin.weight,))
    return origin.weights if isinstance(origin, Changed) else frozenset()


class StorageTrace:
    """The writes to one storage, in elements of one dtype."""

    __slots__ = ("dtype", "key", "owner", "weight", "weights", "writes")

    def __init__(self, tensor: Tensor, weight: int | None = None) -> None:
        self.owner = tensor.untyped_storage()  # keeps its address from being used again
        self.key = storage_key(tensor)
        self.dtype = tensor.dtype
        self.weight = weight
        self.weights: set[int] = set() if weight is None else {weight}
        self.writes: list[tuple[Copy, Origin]] = []

    def write(self, copy: Copy, origin: Origin) -> None:
        if self.weight is not None:  # a loader that changes what it is given
            numel = self.owner.nbytes() // self.dtype.itemsize
            self.writes.append((Copy((numel,), 0, (1,), 0, (1,)), FromWeight(self.weight, (self.dtype,))))
            self.weight = None
        self.writes.append((copy, origin))
        self.weights |= weights_of(origin)


class LoaderTracer(DispatchTracer):  # type: ignore[no-untyped-call]
    """Follows the weights of a manifest, on meta, into every storage that a loader writes them to."""

    def __init__(self, manifest: WeightManifest) -> None:
        super().__init__()
        self.failures: dict[int, str] = {}
        self.storages: dict[int, StorageTrace] = {}
        self._pending = enumerate(list(self._weights(manifest)))

    def watch(self, tensor: Tensor, weight: int | None = None) -> StorageTrace:
        """Return the trace of a tensor's storage, a new one where it has none: of a weight, or of nothing known."""
        key = storage_key(tensor)
        if key not in self.storages:
            self.storages[key] = StorageTrace(tensor, weight)
        return self.storages[key]

    def feed(self, load_weights: LoadWeights) -> None:
        """Call the loader; where it raises, call it again with the weights after the one that it took last."""
        while True:
            taken: list[int] = []
            try:
                load_weights(_taking(self._pending, taken))
                return
            except SyncError:
                raise
            except Exception as error:  # whatever a loader does with a tensor that has no values
                at = taken[-1] if taken else -1
                self.failures.setdefault(at, failure_text(error))
                _log.debug("loader trace: %s", self.failures[at], exc_info=True)
                if not taken or len(self.failures) > _MAX_FAILURES:
                    return

    def _weights(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        for index, weight in enumerate(manifest.weights):
            dtype = dtype_of(weight.dtype)
            if weight.parameter is None:
                tensor = torch.empty(weight.shape, dtype=dtype, device="meta")
                self.watch(tensor).write(_whole(tensor), Changed("the trainer computes it", frozenset((index,))))
            else:
                memory = torch.empty(manifest.parameters[weight.parameter].numel, dtype=dtype, device="meta")
                tensor = memory.as_strided(weight.shape, weight.stride, weight.offset)
                self.watch(tensor, index)
            yield weight.name, tensor

    # ------------------------------------------------------------------------------------- operations

    def handler(self, func: Any) -> Handler:
        aten = torch.ops.aten
        if func.is_view:
            return _run
        known = {
            aten.copy_.default: self._copy_,
            aten.fill_.Scalar: self._fill_,
            aten.zero_.default: self._fill_,
            aten.clone.default: self._clone,
            COPY_TO: self._clone,
            aten.cat.default: self._cat,
            aten.stack.default: self._stack,
        }
        known |= dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), self._zeros)
        return known.get(func, self._other)

    def _copy_(self, func: Any, args: Any, kwargs: Any) -> Any:
        into, source = args[0], args[1]
        self._assign(into, source if source.shape == into.shape else source.expand(into.shape))
        return into

    def _fill_(self, func: Any, args: Any, kwargs: Any) -> Any:
        into = args[0]
        self._put(into, _whole(into), Constant(float(args[1]) if len(args) > 1 else 0.0))
        return into

    def _zeros(self, func: Any, args: Any, kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        self._put(made, _whole(made), Constant(0.0))
        return made

    def _clone(self, func: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("device") is not None and args[0].is_meta:
            kwargs = kwargs | {"device": args[0].device}  # no device has values
        made = func(*args, **kwargs)
        if storage_key(args[0]) in self.storages:
            self._assign(made, args[0])
        return made

    def _cat(self, func: Any, args: Any, kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        parts = [part for part in args[0] if part.shape != (0,)]
        for part, place in zip(parts, made.split([part.shape[dim] for part in parts], dim), strict=True):
            self._assign(place, part)
        return made

    def _stack(self, func: Any, args: Any, kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        for part, place in zip(args[0], made.unbind(dim), strict=True):
            self._assign(place, part)
        return made

    def _other(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run any other operation: what it makes of weights is no copy of them."""
        made = func(*args, **kwargs)
        weights = frozenset[int]().union(*map(self._weights_in, tensors_in((args, kwargs))))
        outputs = [tensor for tensor in tensors_in(made) if storage_key(tensor) not in self.storages]
        for tensor in (*(outputs if weights else ()), *written_tensors(func, args, kwargs)):
            self._put(tensor, _whole(tensor), Changed(f"{func} made it", weights))
        return made

    def _weights_in(self, tensor: Tensor) -> set[int]:
        trace = self.storages.get(storage_key(tensor))
        return trace.weights if trace else set()

    # --------------------------------------------------------------------------------------- storages

    def _assign(self, into: Tensor, source: Tensor) -> None:
        """Record that ``into`` is written with ``source``, of the same shape."""
        copy = Copy(into.shape, offset_of(source), source.stride(), offset_of(into), into.stride())
        for part, origin in self._origins(source, copy):
            self._put(into, part, origin)

    def _origins(self, source: Tensor, copy: Copy) -> list[tuple[Copy, Origin]]:
        """Return the origins of the elements that a copy takes, with the part of the copy that takes each."""
        trace = self.storages.get(storage_key(source))
        if trace is None:
            return [(copy, Changed("it comes from a tensor that is no weight", frozenset()))]
        if trace.dtype != source.dtype:
            return [(copy, Changed(f"its bytes are read as {dtype_name(source.dtype)}", frozenset(trace.weights)))]
        if trace.weight is not None:
            return [(copy, FromWeight(trace.weight, (trace.dtype,)))]
        try:
            trace.writes = visible(trace.writes)
            found = [(part, origin) for first, origin in trace.writes for part in compose(first, copy)]
        except NotNestedError as error:
            return [(copy, Changed(f"it goes through {error}", frozenset(trace.weights)))]
        if sum(part.numel for part, _ in found) < copy.numel:
            return [(copy, Changed("it comes from memory that no weight was written to", frozenset(trace.weights)))]
        return found

    def _put(self, into: Tensor, copy: Copy, origin: Origin) -> None:
        trace = self.watch(into)
        if trace.dtype != into.dtype:
            reason = f"it is written as {dtype_name(into.dtype)}"
            copy, origin = _everything(trace), Changed(reason, weights_of(origin))
        elif isinstance(origin, FromWeight):
            origin = FromWeight(origin.weight, (*origin.dtypes, into.dtype))
        trace.write(copy, origin)


def failure_text(error: Exception) -> str:
    return f"its loader raised {type(error).__name__}: {error}"


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _taking(weights: Iterator[tuple[int, tuple[str, Tensor]]], taken: list[int]) -> Iterator[tuple[str, Tensor]]:
    for index, named in weights:
        taken.append(index)
        yield named


def offset_of(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _whole(tensor: Tensor) -> Copy:
    """Return the copy that spreads one element over the whole tensor."""
    return Copy(tensor.shape, 0, (0,) * tensor.dim(), offset_of(tensor), tensor.stride())


def _everything(trace: StorageTrace) -> Copy:
    return Copy((trace.owner.nbytes() // trace.dtype.itemsize,), 0, (0,), 0, (1,))
