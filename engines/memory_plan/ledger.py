"""The memory of tensors on the meta device, as an allocator of the planned device would give it.

``Ledger`` is a dispatch mode: it sees every operator, gives each new storage a block, and frees the block when the
storage dies, which is the moment in which a real one would go back. What cannot be read from tensors without values is
read as ones. It also counts the floating-point operations of products and attention.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from rlcore._torch_private import COPY_TO, TorchDispatchMode, storage_key, tree_leaves
from rlcore.engines._torch_private import (
    ADDS_PRODUCT,
    CHANGED_BY_AUTOGRAD,
    CHANGES_VALUES_ALONE,
    READ_SCALAR,
    reuses_gradient,
)
from rlcore.engines.memory_plan.allocator import Allocator
from rlcore.engines.memory_plan.results import Results
from rlcore.errors import UnsupportedError

Inside = Callable[..., list[int]]
"""From an operator's arguments, the bytes of each tensor that it takes inside and frees before it returns."""
Flops = Callable[..., int]
Event = tuple[Any, ...]
"""A method of ``Ledger``, and what it was given besides the ledger."""


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The blocks of all storages on the meta device that are made inside.

    Args:
        inside: name of an operator -> what it takes where no mode sees it.
        flops: name of an operator -> its floating-point operations, besides those that torch counts.
    """

    def __init__(self, allocator: Allocator, inside: dict[str, Inside], flops: dict[str, Flops]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocator = allocator
        self.flops = 0
        self._inside, self._flops = inside, flops
        self._operators: dict[int, _Operator] = {}
        """By id: torch keeps its operators for ever, and hashes them in Python."""
        self._storages: dict[int, tuple[Any, int, str]] = {}
        self._labels: Counter[str] = Counter()
        self.at_peak: Counter[str] = Counter()
        """Bytes by what they are, when the allocator held most."""
        self.name_of: Callable[[Tensor], str] = lambda tensor: "activations"
        """Says what a tensor is that an operator has made."""
        self._recorded_peak = 0
        self._events: list[Event] | None = None

    # ------------------------------------------------------------------------------------------ operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = self._operators.get(id(func)) or self._operator(func)
        if operator.read is not None and _is_meta(args[0]) and operator.read.is_needed(kwargs):
            return operator.read.ones(args[0])
        if operator.changes_values_alone and any(map(_is_meta, tree_leaves(args))):
            return None
        result = self._run(operator, args, kwargs)
        made = [leaf for leaf in tree_leaves(result) if _is_meta(leaf)]
        if not made:
            return result  # of tensors of the host, or of a dry run
        for tensor in made:
            self.add(tensor, self.name_of(tensor))
        if operator.inside is not None:
            self.take_inside(operator.inside(*args, **kwargs))
        if operator.flops is not None:
            self.flops += operator.flops(args, kwargs, result)
        return result

    def _operator(self, func: Any) -> _Operator:
        found = _Operator(func, self._inside.get(func.name()), _flops_of(func, self._flops.get(func.name())))
        self._operators[id(func)] = found
        return found

    @staticmethod
    def _run(operator: _Operator, args: Any, kwargs: Any) -> Any:
        if operator.func is ADDS_PRODUCT and _is_meta(kwargs["out"]):
            return kwargs["out"]
        try:
            if not operator.may_reuse or not _is_meta(args[0]) or not reuses_gradient(args[0]):
                return operator.results.of(args, kwargs)
            result = operator.results.of(args, kwargs)
            return args[0] if result.shape == args[0].shape and result.dtype == args[0].dtype else result
        except NotImplementedError as error:
            raise UnsupportedError(f"a plan of a step with {operator.func}", f"it needs values: {error}") from error

    # ------------------------------------------------------------------------------------------- storages

    def add(self, tensor: Tensor, name: str) -> None:
        """Give the storage of ``tensor`` a block, unless it has one, and note what it is."""
        storage = tensor.untyped_storage()
        key, nbytes = storage_key(storage), storage.nbytes()
        if nbytes and key not in self._storages:
            self._do(Ledger._take, key, nbytes, name)
            weakref.finalize(storage, self._do, Ledger._free, key)

    def take_inside(self, sizes: list[int]) -> None:
        """Take blocks where no tensor is seen, and free them, the last one first."""
        self._do(Ledger._pass, [nbytes for nbytes in sizes if nbytes])

    def rename(self, tensor: Tensor, name: str) -> None:
        """Note that the storage of ``tensor`` is something else."""
        self._do(Ledger._rename, storage_key(tensor.untyped_storage()), name)

    def held(self) -> Counter[str]:
        """Return the bytes that are held now, by what they are."""
        return +self._labels

    # --------------------------------------------------------------------------------------------- events

    @contextmanager
    def recording(self) -> Iterator[list[Event]]:
        """Yield the list of what happens inside."""
        events: list[Event] = []
        self._events = events
        try:
            yield events
        finally:
            self._events = None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Take and free what is in no list of events, and count no operations."""
        events, flops = self._events, self.flops
        self._events = None
        try:
            yield
        finally:
            self._events, self.flops = events, flops

    def repeat(self, events: list[Event]) -> None:
        """Let ``events`` happen again, but for storages that they have left, which are there by now."""
        left: dict[int, int] = {}
        for number, (do, key, *_) in enumerate(events):
            if do is Ledger._take:
                left[key] = number
            elif do is Ledger._free:
                left.pop(key, None)
        kept, self._storages = self._storages, {}  # a key may have become that of a storage which lives now
        for number in sorted(set(range(len(events))).difference(left.values())):
            do, *given = events[number]
            do(self, *given)
        self._storages = kept

    def _do(self, event: Callable[..., None], *given: Any) -> None:
        if self._events is not None:
            self._events.append((event, *given))
        event(self, *given)

    def _take(self, key: int, nbytes: int, name: str) -> None:
        self._storages[key] = self.allocator.allocate(nbytes), nbytes, name
        self._labels[name] += nbytes
        self._note_peak()

    def _free(self, key: int) -> None:
        if key in self._storages:
            block, nbytes, name = self._storages.pop(key)
            self._labels[name] -= nbytes
            self.allocator.free(block)

    def _rename(self, key: int, name: str) -> None:
        if key in self._storages:
            block, nbytes, before = self._storages[key]
            self._labels[before] -= nbytes
            self._labels[name] += nbytes
            self._storages[key] = block, nbytes, name

    def _pass(self, sizes: list[int]) -> None:
        blocks = [self.allocator.allocate(nbytes) for nbytes in sizes]
        self._labels["activations"] += sum(sizes)
        self._note_peak()
        self._labels["activations"] -= sum(sizes)
        for block in reversed(blocks):
            self.allocator.free(block)

    # ---------------------------------------------------------------------------------------------- peaks

    def reset_peaks(self) -> None:
        self.allocator.reset_peaks()
        self._recorded_peak = self.flops = 0
        self._note_peak()

    def _note_peak(self) -> None:
        if self.allocator.allocated > self._recorded_peak:
            self._recorded_peak = self.allocator.allocated
            self.at_peak = +self._labels


def _flops_of(func: Any, own: Flops | None) -> Callable[[Any, Any, Any], int] | None:
    """Return a function of an operator's arguments and result."""
    if own is not None:
        return lambda args, kwargs, result: own(*args, **kwargs)
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return None

    def counted(args: Any, kwargs: Any, result: Any) -> int:
        shaped = [value for value in args if not isinstance(value, torch.dtype)]  # of products into another dtype
        return int(count(*shaped, **kwargs, out_val=result))

    return counted


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


_HOST = torch.device("cpu")


class _Read:
    """A read of values, which are ones."""

    def is_needed(self, kwargs: dict[str, Any]) -> bool:
        return True

    def ones(self, tensor: Tensor) -> Any:
        return torch.ones((), dtype=tensor.dtype).item()


class _CopyToHost(_Read):
    def is_needed(self, kwargs: dict[str, Any]) -> bool:
        device = kwargs.get("device")
        return device is not None and torch.device(device) == _HOST

    def ones(self, tensor: Tensor) -> Any:
        return torch.ones(tensor.shape, dtype=tensor.dtype)


_READS = {COPY_TO: _CopyToHost(), READ_SCALAR: _Read()}


class _Operator:
    """An operator with all that there is to know about it, looked up once."""

    def __init__(self, func: Any, inside: Inside | None, flops: Callable[[Any, Any, Any], int] | None) -> None:
        self.func, self.inside, self.flops = func, inside, flops
        self.results = Results(func)
        self.read = _READS.get(func)
        self.changes_values_alone = func in CHANGES_VALUES_ALONE
        self.may_reuse = func in CHANGED_BY_AUTOGRAD
