"""Move the storages of tensors to host memory and back, in place.

A storage is freed and refilled (``untyped_storage().resize_``) rather than replaced, so that every parameter, DTensor
and optimizer state that looks at it stays the same object. Touching a freed storage is a segmentation fault: whoever
uses this also guards the tensors' users (``guards.py``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlcore.errors import UnsupportedError
from rlcore.types import OffloadReport


class HostBuffers:
    """Host memory for one set of tensors; allocated at the first offload and kept for the next."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._buffers: list[Tensor] = []
        self._away: list[tuple[torch.UntypedStorage, int]] = []

    def offload(self, tensors: Iterable[Tensor]) -> OffloadReport:
        """Copy every distinct storage to the host and free it. On failure all stay on the device."""
        started = time.perf_counter()
        away = [(storage, storage.nbytes()) for storage in distinct_storages(tensors)]
        first_use = self._reserve([nbytes for _, nbytes in away])
        for (storage, nbytes), buffer in zip(away, self._buffers, strict=False):
            buffer[:nbytes].copy_(_bytes_of(storage), non_blocking=True)
        self._device.synchronize()
        for storage, _ in away:
            storage.resize_(0)
        self._away = away
        moved = sum(nbytes for _, nbytes in away)
        return self._report(started, moved=moved, freed=moved, first_use=first_use)

    def onload(self) -> OffloadReport:
        """Bring back what ``offload`` took; after ``release`` only the room, its values undefined.

        On failure (the device has no memory) everything stays on the host.
        """
        started = time.perf_counter()
        self._take_device_memory()
        for (storage, nbytes), buffer in zip(self._away, self._buffers, strict=False):
            _bytes_of(storage).copy_(buffer[:nbytes], non_blocking=True)
        self._device.synchronize()
        taken = sum(nbytes for _, nbytes in self._away)
        self._away = []
        return self._report(started, moved=taken if self._buffers else 0, freed=-taken, first_use=False)

    def release(self, tensors: Iterable[Tensor]) -> OffloadReport:
        """Free the storages and all host memory, without copying."""
        started = time.perf_counter()
        freed = 0
        if not self._away:
            self._away = [(storage, storage.nbytes()) for storage in distinct_storages(tensors)]
            freed = sum(nbytes for _, nbytes in self._away)
        for storage, _ in self._away:
            storage.resize_(0)
        self._buffers = []
        return self._report(started, moved=0, freed=freed, first_use=False)

    def forget(self) -> None:
        """Whoever holds the tensors has replaced them: nothing is to be brought back."""
        self._away = []

    @property
    def host_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers)

    def _reserve(self, sizes: list[int]) -> bool:
        """Make buffer i hold at least sizes[i]; True if memory had to be allocated."""
        is_grown = False
        for position, nbytes in enumerate(sizes):
            if position < len(self._buffers) and self._buffers[position].numel() >= nbytes:
                continue
            buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._device.memory.can_pin)
            self._buffers[position : position + 1] = [buffer]
            is_grown = True
        return is_grown

    def _take_device_memory(self) -> None:
        for position, (storage, nbytes) in enumerate(self._away):
            try:
                storage.resize_(nbytes)
            except (RuntimeError, MemoryError):  # torch.OutOfMemoryError is a RuntimeError
                for earlier, _ in self._away[:position]:
                    earlier.resize_(0)
                raise

    def _report(self, started: float, *, moved: int, freed: int, first_use: bool) -> OffloadReport:
        return OffloadReport(
            moved_bytes=moved,
            freed_device_bytes=freed,
            seconds=time.perf_counter() - started,
            pinned=self._device.memory.can_pin,
            first_use=first_use,
        )


def distinct_storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Every storage once, in order; tied parameters and views share one.

    Raises:
        UnsupportedError: a storage belongs to a file or to numpy, so that it cannot be freed.
    """
    found = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if not storage.resizable():
            raise UnsupportedError(
                f"offloading a tensor of shape {list(tensor.shape)} made from a file or a numpy array",
                "torch cannot free its storage; give the module or optimizer tensor.clone() instead",
            )
        found[storage._cdata] = storage
    return list(found.values())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
