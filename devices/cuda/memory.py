"""Memory of NVIDIA GPUs: host buffers registered with the driver, batches as single calls, IPC."""

from __future__ import annotations

import collections
import functools
import itertools
import threading
import weakref
from typing import ClassVar, final

import numpy as np
import torch

from rlcore._torch_private import copy_all
from rlcore.device import Device, HostMemory
from rlcore.devices.copy_batch import Batch, BatchSide, Flags
from rlcore.devices.cuda import driver
from rlcore.devices.cuda.sharing import CudaSharing
from rlcore.devices.host_memory import HostBuffer, check_nbytes, map_pages
from rlcore.devices.ipc.sharing import Sharing
from rlcore.devices.memory import TorchMemory
from rlcore.types import Capability


@final
class CudaMemory(TorchMemory):
    sharing_class: ClassVar[type[Sharing] | None] = CudaSharing

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._settling = threading.Lock()
        self._in_flight: collections.deque[tuple[torch.cuda.Event, list[torch.Tensor]]] = collections.deque()

    def limits(self) -> dict[str, Capability]:
        limits = super().limits()
        del limits["host_alloc"]
        if driver.can_copy_batch():
            del limits["copy_batch"]
        return limits

    def host_alloc(self, nbytes: int) -> HostBuffer:
        check_nbytes(nbytes)
        memory = map_pages(nbytes)
        address = memory.ctypes.data
        with driver.current(self._device.index):
            driver.register_host(address, nbytes)
        _registered[address] = nbytes
        weakref.finalize(memory, _unregister, self._device.index, address)
        return HostBuffer(memory, is_pinned=True)

    def host_free(self, buffer: HostMemory) -> None:
        self._device.synchronize()
        self._settle()
        super().host_free(buffer)

    def _copy(self, batch: Batch) -> None:
        is_linked = _crosses_link(batch) if driver.can_copy_batch() else np.zeros(len(batch.dst.tensors), dtype=bool)
        if is_linked.any():
            self._copy_linked(batch, is_linked)
        if not is_linked.all():
            dst, src = (list(itertools.compress(side.tensors, ~is_linked)) for side in (batch.dst, batch.src))
            copy_all(dst, src, non_blocking=True)

    def _copy_linked(self, batch: Batch, chosen: Flags) -> None:
        queue = stream = torch.cuda.current_stream(self._torch_device)
        if not queue.cuda_stream:  # the driver takes no batch on the legacy default stream
            queue = self._side_stream
            queue.wait_stream(stream)
        with driver.current(self._device.index):
            driver.copy_batch(
                batch.dst.start[chosen], batch.src.start[chosen], batch.dst.nbytes[chosen], queue.cuda_stream
            )
        if queue is not stream:
            stream.wait_stream(queue)
        self._keep_until_done(batch, queue)

    def _keep_until_done(self, batch: Batch, queue: torch.cuda.Stream) -> None:
        """Keep host tensors until the copies are done; torch's pinned allocator would reuse their memory at once."""
        host = [tensor for side in (batch.dst, batch.src) for tensor in side.tensors if tensor.is_cpu]
        done = queue.record_event()
        self._settle()
        self._in_flight.append((done, host))

    def _settle(self) -> None:
        with self._settling:  # another thread may remove the entry that this one has just seen
            while self._in_flight and self._in_flight[0][0].query():  # type: ignore[no-untyped-call]
                self._in_flight.popleft()

    @functools.cached_property
    def _side_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._torch_device)  # type: ignore[no-untyped-call]


_registered: dict[int, int] = {}
"""Address -> bytes of the pinned host buffers of this process; each is pinned for all devices."""


def _unregister(index: int, address: int) -> None:
    del _registered[address]
    with driver.current(index):
        driver.unregister_host(address)


def _crosses_link(batch: Batch) -> Flags:
    """Return for each pair True if it is a contiguous copy between the device and pinned host memory."""
    host = torch.device("cpu")
    is_to_host, is_from_host = batch.dst.is_on(host), batch.src.is_on(host)
    crosses: Flags = batch.dst.is_dense & batch.src.is_dense & (is_to_host != is_from_host)
    for side, is_host in ((batch.dst, is_to_host), (batch.src, is_from_host)):
        crosses &= ~is_host | _is_pinned(side, crosses & is_host)
    return crosses


def _is_pinned(side: BatchSide, candidates: Flags) -> Flags:
    """Return for each tensor True if it is pinned; the slow query of the driver is skipped inside our own buffers."""
    is_pinned = np.zeros_like(candidates)
    for address, nbytes in list(_registered.items()):
        is_pinned |= (side.start >= address) & (side.start + side.nbytes <= address + nbytes)
    for position in np.flatnonzero(candidates & ~is_pinned):
        is_pinned[position] = side.tensors[position].is_pinned()
    return is_pinned
