"""Memory of a device: what is there, what this process holds, host memory to copy from, and sharing with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch

from rlcore.arguments import LIST, optional
from rlcore.devices.copy_batch import Batch
from rlcore.devices.host_memory import HostBuffer, check_nbytes
from rlcore.devices.ipc import Ipc, OnRevoke
from rlcore.devices.ipc_exporter import exporter
from rlcore.devices.ipc_mapping import Mapping
from rlcore.devices.ipc_sharing import Sharing
from rlcore.devices.part import Part
from rlcore.devices.pool import Pool
from rlcore.devices.streams import STREAM
from rlcore.errors import InvalidInputError
from rlcore.tensor_data import dtype_name
from rlcore.types import Capability, IpcExport, IpcHandle, MemoryInfo, MemoryStats

if TYPE_CHECKING:
    from rlcore.devices.generic import GenericTorchDevice


class Memory(Part):
    """Through ``torch.accelerator``, which covers CUDA, ROCm, XPU, MPS and out-of-tree back ends."""

    name: ClassVar = "memory"
    members: ClassVar = (
        "info",
        "stats",
        "reset_peak",
        "empty_cache",
        "pool",
        "host_alloc",
        "host_free",
        "copy_batch",
        "export_ipc",
        "import_ipc",
        "revoke",
        "ledger",
    )
    accepts: ClassVar = {
        "copy_batch": {"stream": optional(STREAM)},
        "export_ipc_together": {"tensors": LIST},
        "import_ipc_together": {"handles": LIST},
    }
    sharing_class: ClassVar[type[Sharing] | None] = None
    """How this vendor's memory is opened by other processes; None: it cannot be."""

    def __init__(self, device: GenericTorchDevice) -> None:
        super().__init__(device)
        self._ipc = Ipc(device, self.sharing_class(device)) if self.sharing_class else None
        self._pools: dict[str, Pool] = {}

    def limits(self) -> dict[str, Capability]:
        evidence = self._device.evidence
        limits = {
            "host_alloc": Capability(
                "emulated", evidence, "by torch's pinned allocator, which rounds sizes up to a power of two"
            ),
            "copy_batch": Capability("emulated", evidence, "by torch._foreach_copy_, which may copy one by one"),
        }
        module = torch.get_device_module(self._device.type)
        if getattr(module, "MemPool", None) is None:
            limits["pool"] = Capability("unsupported", evidence, f"{module.__name__} has no MemPool")
        if self.sharing_class is None:
            reason = (
                f"{self._device.spec.name} names no devices.ipc_sharing.Sharing, by which processes open its memory"
            )
            unshared = Capability("unsupported", evidence, reason)
            limits |= dict.fromkeys(("export_ipc", "import_ipc", "revoke", "ledger"), unshared)
        return limits

    def info(self) -> MemoryInfo:
        """Free and total bytes of the whole device, whoever uses it."""
        free, total = torch.get_device_module(self._torch_device).mem_get_info(self._torch_device)
        return MemoryInfo(int(free), int(total))

    def stats(self) -> MemoryStats:
        """What this process's allocator holds."""
        return MemoryStats(
            allocated_bytes=torch.accelerator.memory_allocated(self._torch_device),
            reserved_bytes=torch.accelerator.memory_reserved(self._torch_device),
            peak_allocated_bytes=torch.accelerator.max_memory_allocated(self._torch_device),
        )

    def reset_peak(self) -> None:
        """Start a new measurement of ``stats().peak_allocated_bytes``."""
        torch.accelerator.reset_peak_memory_stats(self._torch_device)

    def empty_cache(self) -> None:
        """Give freed memory that the allocator keeps back to the device; of pools, where no tensor is left in one."""
        for pool in self._pools.values():
            pool.empty_cache()
        torch.accelerator.empty_cache()

    def pool(self, tag: str) -> Pool:
        """Memory kept apart under ``tag``: a context manager that sends this thread's allocations there.

        The same tag gives the same pool, with its ``stats()``.

        Raises:
            UnsupportedError: this device's torch module has no MemPool.
        """
        if "pool" in self.limits():
            raise self.unsupported("pool")
        if not isinstance(tag, str) or not tag:
            raise InvalidInputError(f"pool takes a tag such as 'weights', got {tag!r}")
        return self._pools.setdefault(tag, Pool(tag, self._torch_device))

    def host_alloc(self, nbytes: int) -> HostBuffer:
        """Host memory that this device copies from and to at the speed of its link.

        Args:
            nbytes: at least 1.

        Raises:
            DeviceError: there is not so much, or it cannot be registered.
        """
        check_nbytes(nbytes)
        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return HostBuffer(pinned.numpy(), is_pinned=pinned.is_pinned())

    def host_free(self, buffer: HostBuffer) -> None:
        """Give a buffer of ``host_alloc`` back, after all work queued on this device.

        Raises:
            StateError: it was freed before, or a tensor still looks at it.
        """
        if not isinstance(buffer, HostBuffer):
            raise InvalidInputError(f"host_free takes what host_alloc returned, got {type(buffer).__name__}")
        self._device.synchronize()
        buffer.free()

    @torch.no_grad()
    def copy_batch(
        self, dst: Sequence[torch.Tensor], src: Sequence[torch.Tensor], stream: torch.Stream | None = None
    ) -> None:
        """Copy ``src[i]`` into ``dst[i]``, all of them in few calls, queued on ``stream`` (None: the current one).

        Args:
            dst: tensors on this device or in host memory, contiguous or not.
            src: of the same shapes and dtypes, on this device or in host memory.

        The order is not defined, so that no destination may overlap another one or a source; contiguous tensors are
        checked. Host memory is read and written after the call has returned: wait for the stream before using it.

        Raises:
            InvalidInputError: lists of unequal length, pairs that differ, were freed, or overlap.
        """
        batch = Batch(dst, src, self._torch_device)
        if batch.dst.tensors:
            with self._device.streams.use(stream or self._device.streams.current()):
                self._copy(batch)

    def export_ipc(self, tensor: torch.Tensor) -> IpcHandle:
        """A handle by which other processes of this user on this machine open the memory of ``tensor``.

        Its whole storage is kept alive, and in the ledger, until ``revoke``. Tensors of one storage share one export.
        Do not free or resize the storage in place before that; on the CPU torch cannot grow it afterwards either.
        Nothing is synchronised: the work that fills the tensor must be done before another process reads it, or
        ordered by an interprocess event.

        Raises:
            UnsupportedError: this device's memory, or this block of it, cannot be shared; says why.
            InvalidInputError: the tensor is elsewhere, or is more than its memory (a subclass, quantized, conjugate).
        """
        (whole,), ((_, first),) = self.export_ipc_together([tensor])
        return replace(
            whole,
            storage_offset_bytes=first,
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
        )

    def export_ipc_together(self, tensors: Sequence[torch.Tensor]) -> tuple[list[IpcHandle], list[tuple[int, int]]]:
        """``export_ipc`` of many tensors that are revoked together: those in one block of memory share an export.

        A storage that is exported already keeps the export that it has.

        Returns:
            a handle of all bytes (uint8) of each export, and for each tensor which of them it is in, and the byte at
            which it begins there.

        Raises:
            UnsupportedError, InvalidInputError: as ``export_ipc``.
        """
        return self._sharing("export_ipc").export_tensors(tensors)

    def import_ipc(self, handle: IpcHandle, on_revoke: OnRevoke | None = None, *, timeout_s: float = 30.0) -> Mapping:
        """Open another process's tensor on this device, without a copy; opened once, however often it is imported.

        Args:
            handle: from ``export_ipc``; of any device of this kind on this machine that this one can reach.
            on_revoke: called once with the mapping when the exporter wants its memory back or has ended, in a thread
                that hears the exporter; it may close the mapping.
            timeout_s: for the exporter to answer.

        Raises:
            StateError: the export was revoked or freed.
            DeviceError: the exporter has ended or does not answer, or the memory cannot be reached from here.
            InvalidInputError: the handle is of another kind of device or another machine.
        """
        return self._sharing("import_ipc").import_tensors([handle], on_revoke, timeout_s)[0]

    def import_ipc_together(
        self, handles: Sequence[IpcHandle], on_revoke: OnRevoke | None = None, *, timeout_s: float = 30.0
    ) -> list[Mapping]:
        """``import_ipc`` of many handles of one process, all or none: it is asked for some while others are opened.

        Args:
            on_revoke: called once for each mapping.
            timeout_s: for the exporter to answer for all.

        Raises:
            StateError, DeviceError, InvalidInputError: as ``import_ipc``.
        """
        return self._sharing("import_ipc").import_tensors(handles, on_revoke, timeout_s)

    def revoke(self, handle: IpcHandle, *, timeout_s: float = 30.0) -> None:
        """End the export that ``handle`` belongs to: its importers are asked to close, and when all have, it is let go.

        A process that ends has closed. Only the exporting process can do this.

        Raises:
            StateError: it was revoked before, another process exported it, or some process still has it open after
                ``timeout_s`` seconds: names them. Then the memory stays owned, nobody new may open it, and revoke may
                be called again.
        """
        self._sharing("revoke").revoke(handle, timeout_s)

    def ledger(self) -> list[IpcExport]:
        """What this process has exported from this device and not revoked."""
        uuid = self._sharing("ledger").uuid
        return [export for export in exporter().ledger() if export.device_uuid == uuid]

    @property
    def can_pin(self) -> bool:
        """Copies to and from this device are faster from page-locked host memory."""
        return True

    def _copy(self, batch: Batch) -> None:
        """Queue the copies on the current stream."""
        torch._foreach_copy_(batch.dst.tensors, batch.src.tensors, non_blocking=True)

    def _sharing(self, member: str) -> Ipc:
        if self._ipc is None:
            raise self.unsupported(member)
        return self._ipc

    @property
    def _torch_device(self) -> torch.device:
        return self._device.torch_device
