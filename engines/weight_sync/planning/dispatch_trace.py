"""Where the elements of every tensor come from while a loader works on the meta device.

A dispatch mode sees every operation. A copy from a weight, whatever views are taken on the way, is a strided copy
between two storages; through a temporary tensor it is two, which are composed. Anything else done to a value is a
change, which is named and handed on to whatever the value is written to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlcore.engines.weight_sync.planning.manifest import Manifest, dtype_of
from rlcore.engines.weight_sync.planning.strided_copy import Copy, compose, visible
from rlcore.engines.weight_sync.planning.strided_layout import NotNestedError
from rlcore.errors import SyncError
from rlcore.tensor_data import dtype_name

_log = logging.getLogger(__name__)
_MAX_FAILURES = 256
"""A loader that fails for so many weights is not asked again."""

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Any]


class Weighted(NamedTuple):
    """Elements of a weight; the copy's source is the weight's parameter."""

    weight: int
    dtypes: tuple[torch.dtype, ...]
    """Through which they went: the weight's own first, last that in which they are."""


class Constant(NamedTuple):
    """The same value everywhere, whatever the weights are."""

    value: float


class Changed(NamedTuple):
    """More than a copy."""

    reason: str
    weights: frozenset[int]


Origin = Weighted | Constant | Changed


def weights_of(origin: Origin) -> frozenset[int]:
    if isinstance(origin, Weighted):
        return frozenset((origin.weight,))
    return origin.weights if isinstance(origin, Changed) else frozenset()


class Memory:
    """What is known of a storage, in elements of one dtype."""

    __slots__ = ("dtype", "owner", "weight", "weights", "writes")

    def __init__(self, tensor: Tensor, weight: int | None = None) -> None:
        self.owner = tensor.untyped_storage()  # keeps its address from being used again
        self.dtype = tensor.dtype
        self.weight = weight
        self.weights: set[int] = set() if weight is None else {weight}
        self.writes: list[tuple[Copy, Origin]] = []

    def write(self, copy: Copy, origin: Origin) -> None:
        if self.weight is not None:  # a loader that changes what it is given
            numel = self.owner.nbytes() // self.dtype.itemsize
            self.writes.append((Copy((numel,), 0, (1,), 0, (1,)), Weighted(self.weight, (self.dtype,))))
            self.weight = None
        self.writes.append((copy, origin))
        self.weights |= weights_of(origin)


class _Provenance:
    """Knows of every storage that weights reach where its elements come from."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        self.failures: dict[int, str] = {}
        self.memories: dict[int, Memory] = {}
        self._handlers: dict[Any, Callable[..., Any]] = {}
        self._pending = enumerate(list(self._weights(manifest)))

    def watch(self, tensor: Tensor, weight: int | None = None) -> Memory:
        key = storage_key(tensor)
        if key not in self.memories:
            self.memories[key] = Memory(tensor, weight)
        return self.memories[key]

    def feed(self, load_weights: LoadWeights) -> None:
        """One call of the loader; where it raises, another with the weights behind the one that it took last."""
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
                _log.debug("recording: %s", self.failures[at], exc_info=True)
                if not taken or len(self.failures) > _MAX_FAILURES:
                    return

    def _weights(self, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = self._handlers.get(func)
        if handler is None:
            handler = self._handlers[func] = self._handler(func)
        return handler(func, args, kwargs or {})

    def _handler(self, func: Any) -> Callable[..., Any]:
        aten = torch.ops.aten
        if func.is_view:
            return _run
        known = {
            aten.copy_.default: self._copy_,
            aten.fill_.Scalar: self._fill_,
            aten.zero_.default: self._fill_,
            aten.clone.default: self._clone,
            aten._to_copy.default: self._clone,
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
            kwargs = kwargs | {"device": args[0].device}  # wherever a loader wants the values, there are none
        made = func(*args, **kwargs)
        if storage_key(args[0]) in self.memories:
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
        """Whatever it makes of weights is no copy of them."""
        made = func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        weights = frozenset[int]().union(*(self._weights_in(tensor) for tensor in given))
        outputs = [
            leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor) and storage_key(leaf) not in self.memories
        ]
        for tensor in (*(outputs if weights else ()), *_written(func, args, kwargs)):
            self._put(tensor, _whole(tensor), Changed(f"{func} made it", weights))
        return made

    def _weights_in(self, tensor: Tensor) -> set[int]:
        memory = self.memories.get(storage_key(tensor))
        return memory.weights if memory else set()

    # ----------------------------------------------------------------------------------------- memory

    def _assign(self, into: Tensor, source: Tensor) -> None:
        """Record that ``into`` is written with ``source``, of the same shape."""
        copy = Copy(into.shape, offset_of(source), source.stride(), offset_of(into), into.stride())
        for part, origin in self._origins(source, copy):
            self._put(into, part, origin)

    def _origins(self, source: Tensor, copy: Copy) -> list[tuple[Copy, Origin]]:
        """Where the elements that a copy takes come from, in the same order."""
        memory = self.memories.get(storage_key(source))
        if memory is None:
            return [(copy, Changed("it comes from a tensor that is no weight", frozenset()))]
        if memory.dtype != source.dtype:
            return [(copy, Changed(f"its bytes are read as {dtype_name(source.dtype)}", frozenset(memory.weights)))]
        if memory.weight is not None:
            return [(copy, Weighted(memory.weight, (memory.dtype,)))]
        try:
            memory.writes = visible(memory.writes)
            found = [(part, origin) for first, origin in memory.writes for part in compose(first, copy)]
        except NotNestedError as error:
            return [(copy, Changed(f"it goes through {error}", frozenset(memory.weights)))]
        if sum(part.numel for part, _ in found) < copy.numel:
            return [(copy, Changed("it comes from memory that no weight was written to", frozenset(memory.weights)))]
        return found

    def _put(self, into: Tensor, copy: Copy, origin: Origin) -> None:
        memory = self.watch(into)
        if memory.dtype != into.dtype:
            reason = f"it is written as {dtype_name(into.dtype)}"
            copy, origin = _everything(memory), Changed(reason, weights_of(origin))
        elif isinstance(origin, Weighted):
            origin = Weighted(origin.weight, (*origin.dtypes, into.dtype))
        memory.write(copy, origin)


class Recorder(_Provenance, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mode. Torch wraps a ``__torch_dispatch__`` of the mode's own class for its compiler, at 2 us an operation."""


def failure_text(error: Exception) -> str:
    return f"its loader raised {type(error).__name__}: {error}"


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _taking(weights: Iterator[tuple[int, tuple[str, Tensor]]], taken: list[int]) -> Iterator[tuple[str, Tensor]]:
    for index, named in weights:
        taken.append(index)
        yield named


def storage_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def offset_of(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _whole(tensor: Tensor) -> Copy:
    """Every element, from one place."""
    return Copy(tensor.shape, 0, (0,) * tensor.dim(), offset_of(tensor), tensor.stride())


def _everything(memory: Memory) -> Copy:
    return Copy((memory.owner.nbytes() // memory.dtype.itemsize,), 0, (0,), 0, (1,))


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation changes in place."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    changed = [
        named.get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)]
