"""The memory of tensors on the meta device, as an allocator of the planned device would give it.

``Ledger`` is a dispatch mode: it sees every operator, gives each new storage a block, and frees the block when the
storage dies, which is the moment in which a real one would go back. What cannot be read from tensors without values is
read as ones.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from rlcore._torch_private import TorchDispatchMode, storage_key, tree_leaves
from rlcore.planning.allocator import Block, CachingAllocator

Transient = Callable[..., list[int]]


class Ledger(TorchDispatchMode):
    """The blocks of all storages on the meta device that were made inside.

    Args:
        transient: operator -> the bytes that it takes inside and frees before it returns, from its arguments.
    """

    def __init__(self, transient: dict[str, Transient]) -> None:
        super().__init__()
        self.allocator = CachingAllocator()
        self.host_bytes = 0
        self._transient = transient
        self._storages: dict[int, tuple[Block, str]] = {}
        self._finalizers: dict[int, Any] = {}
        self.at_peak: Counter[str] = Counter()
        """Bytes by what they are, when the allocator held most."""
        self._labels: Counter[str] = Counter()
        self._recorded_peak = 0

    # ------------------------------------------------------------------------------------------ operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = _READS.get(func)
        if read is not None and _is_meta(args[0]) and read[0](kwargs):
            return read[1](args[0])
        if func in _IN_PLACE_WITHOUT_MEMORY:
            return None
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _is_meta(leaf):
                self.add(leaf, "other")
        taken = self._transient.get(func.name() if hasattr(func, "name") else "")
        if taken is not None:
            blocks = [self.allocator.allocate(nbytes) for nbytes in taken(*args, **kwargs) if nbytes]
            self._note_peak()
            for block in blocks:
                self.allocator.free(block)
        return result

    def add(self, tensor: Tensor, label: str) -> None:
        """Give the storage of ``tensor`` a block, unless it has one, and name what it is."""
        storage = tensor.untyped_storage()
        key, nbytes = storage_key(storage), storage.nbytes()
        if not nbytes:
            return
        if key not in self._storages:
            self._storages[key] = self.allocator.allocate(nbytes), label
            self._labels[label] += self._storages[key][0].size
            self._finalizers[key] = weakref.finalize(storage, self._free, key)
            self._note_peak()

    def label(self, tensor: Tensor, label: str) -> None:
        """Rename what the storage of ``tensor`` is."""
        key = storage_key(tensor.untyped_storage())
        if key in self._storages:
            block, before = self._storages[key]
            self._labels[before] -= block.size
            self._labels[label] += block.size
            self._storages[key] = block, label

    def _free(self, key: int) -> None:
        block, label = self._storages.pop(key)
        self._labels[label] -= block.size
        self.allocator.free(block)
        del self._finalizers[key]

    # ---------------------------------------------------------------------------------------------- peaks

    def reset_peaks(self) -> None:
        self.allocator.reset_peaks()
        self._recorded_peak = 0
        self._note_peak()

    def _note_peak(self) -> None:
        if self.allocator.allocated > self._recorded_peak:
            self._recorded_peak = self.allocator.allocated
            self.at_peak = self._labels.copy()


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


def _to_host(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cpu"


def _ones(tensor: Tensor) -> Tensor:
    return torch.ones(tensor.shape, dtype=tensor.dtype)


_aten = torch.ops.aten
_READS: dict[Any, tuple[Callable[[dict[str, Any]], bool], Callable[[Tensor], Any]]] = {
    _aten._to_copy.default: (_to_host, _ones),
    _aten._local_scalar_dense.default: (lambda kwargs: True, lambda tensor: _ones(tensor.new_empty(())).item()),
}
_IN_PLACE_WITHOUT_MEMORY: Iterable[Any] = {
    _aten._fused_adamw_.default, _aten._fused_adamw_.tensor_lr, _aten._fused_adam_.default, _aten._fused_adam_.tensor_lr,
    _aten._fused_sgd_.default, _aten._fused_sgd_.tensor_lr, _aten._assert_async.default, _aten._assert_async.msg,
}  # fmt: skip
"""Operators that change tensors in place, with values that nobody has, or check them."""
