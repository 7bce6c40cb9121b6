"""The memory of tensors on the meta device, as an allocator of the planned device would give it.

``Ledger`` is a dispatch mode: it sees every operator, gives each new storage a block, and frees the block when the
storage dies, which is the moment in which a real one would go back. What cannot be read from tensors without values is
read as ones. It also counts the floating-point operations of products and attention.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
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
from rlcore.errors import UnsupportedError

Inside = Callable[..., list[int]]
"""From an operator's arguments, the bytes of each tensor that it takes inside and frees before it returns."""
Flops = Callable[..., int]


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
        self._storages: dict[int, tuple[Any, int, str]] = {}
        self._labels: Counter[str] = Counter()
        self.at_peak: Counter[str] = Counter()
        """Bytes by what they are, when the allocator held most."""
        self.name_of: Callable[[Tensor], str] = lambda tensor: "activations"
        """Says what a tensor is that an operator has made."""
        self._recorded_peak = 0

    # ------------------------------------------------------------------------------------------ operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = _READS.get(func)
        if read is not None and _is_meta(args[0]) and read.is_needed(kwargs):
            return read.ones(args[0])
        if func in CHANGES_VALUES_ALONE and any(map(_is_meta, tree_leaves(args))):
            return None
        result = self._run(func, args, kwargs)
        for leaf in tree_leaves(result):
            if _is_meta(leaf):
                self.add(leaf, self.name_of(leaf))
        self._take_inside(func, args, kwargs)
        self._count_flops(func, args, kwargs, result)
        return result

    @staticmethod
    def _run(func: Any, args: Any, kwargs: Any) -> Any:
        if func is ADDS_PRODUCT and _is_meta(kwargs["out"]):
            return kwargs["out"]
        try:
            if func not in CHANGED_BY_AUTOGRAD or not _is_meta(args[0]) or not reuses_gradient(args[0]):
                return func(*args, **kwargs)
            result = func(*args, **kwargs)
            return args[0] if result.shape == args[0].shape and result.dtype == args[0].dtype else result
        except NotImplementedError as error:
            raise UnsupportedError(f"a plan of a step with {func}", f"it needs values: {error}") from error

    def _take_inside(self, func: Any, args: Any, kwargs: Any) -> None:
        found = self._inside.get(func.name())
        if found is None:
            return
        blocks = [(self.allocator.allocate(nbytes), nbytes) for nbytes in found(*args, **kwargs) if nbytes]
        taken = sum(nbytes for _, nbytes in blocks)
        self._labels["activations"] += taken
        self._note_peak()
        self._labels["activations"] -= taken
        for block, _ in blocks:
            self.allocator.free(block)

    def _count_flops(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        own = self._flops.get(func.name())
        if own is not None:
            self.flops += own(*args, **kwargs)
        elif (count := flop_registry.get(func.overloadpacket)) is not None:
            shaped = [value for value in args if not isinstance(value, torch.dtype)]  # of products into another dtype
            self.flops += int(count(*shaped, **kwargs, out_val=result))

    # ------------------------------------------------------------------------------------------- storages

    def add(self, tensor: Tensor, name: str) -> None:
        """Give the storage of ``tensor`` a block, unless it has one, and note what it is."""
        storage = tensor.untyped_storage()
        key, nbytes = storage_key(storage), storage.nbytes()
        if not nbytes or key in self._storages:
            return
        self._storages[key] = self.allocator.allocate(nbytes), nbytes, name
        self._labels[name] += nbytes
        weakref.finalize(storage, self._free, key)
        self._note_peak()

    def rename(self, tensor: Tensor, name: str) -> None:
        """Note that the storage of ``tensor`` is something else."""
        key = storage_key(tensor.untyped_storage())
        if key in self._storages:
            block, nbytes, before = self._storages[key]
            self._labels[before] -= nbytes
            self._labels[name] += nbytes
            self._storages[key] = block, nbytes, name

    def held(self) -> Counter[str]:
        """Return the bytes that are held now, by what they are."""
        return +self._labels

    def _free(self, key: int) -> None:
        block, nbytes, name = self._storages.pop(key)
        self._labels[name] -= nbytes
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
