"""Memory of NVIDIA GPUs: host buffers registered with the driver, batches as single calls, IPC."""

from __future__ import annotations

import collections
import functools
import weakref
from typing import TYPE_CHECKING, ClassVar, final

import numpy as np
import torch

from rlcore.devices.cuda import driver
from rlcore.devices.cuda.sharing import CudaSharing
from rlcore.devices.host_memory import HostBuffer, check_nbytes, map_pages
from rlcore.devices.ipc_sharing import Sharing
from rlcore.devices.memory import Memory
from rlcore.types import Capability

if TYPE_CHECKING:
    from rlcore.devices.generic import GenericTorchDevice


@final
class CudaMemory(Memory):
    sharing_class: ClassVar[type[Sharing] | None] = CudaSharing

    def __init__(self, device: GenericTorchDevice) -> None:
        super().__init__(device)
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
        weakref.finalize(memory, _unregister, self._device.index, address)
        return HostBuffer(memory, is_pinned=True)

    def host_free(self, buffer: HostBuffer) -> None:
        self._device.synchronize()
        self._in_flight.clear()
        super().host_free(buffer)

    def _copy(self, dst: list[torch.Tensor], src: list[torch.Tensor]) -> None:
        if not driver.can_copy_batch():
            super()._copy(dst, src)
            return
        linked: list[tuple[torch.Tensor, torch.Tensor]] = []
        others: list[tuple[torch.Tensor, torch.Tensor]] = []
        for pair in zip(dst, src, strict=True):
            (linked if _crosses_link(*pair) else others).append(pair)
        if linked:
            self._copy_linked(linked)
        if others:
            super()._copy([to for to, _ in others], [from_ for _, from_ in others])

    def _copy_linked(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        addresses = np.array([(to.data_ptr(), from_.data_ptr(), to.nbytes) for to, from_ in pairs], dtype=np.uint64)
        dst, src, sizes = addresses.T.copy()
        queue = stream = torch.cuda.current_stream(self._torch_device)
        if not queue.cuda_stream:  # the driver takes no batch on the legacy default stream
            queue = self._side_stream
            queue.wait_stream(stream)
        with driver.current(self._device.index):
            driver.copy_batch(dst, src, sizes, queue.cuda_stream)
        if queue is not stream:
            stream.wait_stream(queue)
        self._keep_until_done(pairs, queue)

    def _keep_until_done(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], queue: torch.cuda.Stream) -> None:
        """torch's pinned allocator does not know of these copies: memory freed now would be used again at once."""
        while self._in_flight and self._in_flight[0][0].query():  # type: ignore[no-untyped-call]
            self._in_flight.popleft()
        host = [tensor for pair in pairs for tensor in pair if tensor.device.type == "cpu"]
        self._in_flight.append((queue.record_event(), host))

    @functools.cached_property
    def _side_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._torch_device)  # type: ignore[no-untyped-call]


def _crosses_link(to: torch.Tensor, from_: torch.Tensor) -> bool:
    """One plain copy between the device and pinned host memory."""
    if to.device == from_.device or not (to.is_contiguous() and from_.is_contiguous()) or not to.numel():
        return False
    host = to if to.device.type == "cpu" else from_
    return host.device.type == "cpu" and host.is_pinned()


def _unregister(index: int, address: int) -> None:
    with driver.current(index):
        driver.unregister_host(address)
