"""The device as rlcore sees it: the generic one of torch, and the parts that torch has no word for."""

from __future__ import annotations

import os
import struct
import weakref
from typing import ClassVar

import torch

from rlcore.devices.collectives import BITWISE_OPS, TorchCollectives
from rlcore.devices.generic import GenericTorchDevice
from rlcore.devices.host_memory import HostBuffer, check_nbytes, map_pages
from rlcore.devices.ipc.sharing import SharedMemory, Sharing
from rlcore.devices.memory import TorchMemory
from rlcore.devices.streams import TorchStreams
from rlcore.errors import DeviceError, UnsupportedError
from rlcore.registry import get_device
from rlcore.types import Capability, DeviceSpec, Evidence, IpcHandle, MemoryStats, Probe
from rlcore_simdev.faults import has_fault

_NAME = struct.Struct("<QQQ")  # inode of a segment, its bytes, and where in it a storage begins


class SimSharing(Sharing):
    """A segment is an anonymous shared file: its descriptor travels, and it is mapped once for all storages in it."""

    def __init__(self, device: GenericTorchDevice) -> None:
        super().__init__(device)
        self._mapped: dict[int, tuple[int, int]] = {}  # inode -> address, number of uses
        self._leaked: list[int] = []

    def share(self, storage: torch.UntypedStorage) -> SharedMemory:
        tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        descriptor, base, nbytes = torch.ops.simdev.segment_of(tensor)
        if descriptor < 0:
            raise UnsupportedError("export_ipc of this tensor", "its memory belongs to another process, or to the user")
        if has_fault("export_leaks"):
            self._leaked.append(os.dup(descriptor))
        name = _NAME.pack(os.fstat(descriptor).st_ino, nbytes, storage.data_ptr() - base)
        return SharedMemory(name, os.dup(descriptor))

    def open(self, memory: SharedMemory, storage_bytes: int) -> torch.UntypedStorage:
        inode, nbytes, offset = _NAME.unpack(memory.payload)
        if memory.descriptor is None or os.fstat(memory.descriptor).st_ino != inode:
            raise DeviceError("the exporter sent no descriptor of the segment that its handle names")
        address, uses = self._mapped.get(inode, (0, 0))
        if not uses:
            address = torch.ops.simdev.map_segment(memory.descriptor, nbytes)
        self._mapped[inode] = (address, uses + 1)
        tensor = torch.ops.simdev.tensor_at(address + offset, storage_bytes, self._device.index)
        return (tensor.clone() if has_fault("import_copies") else tensor).untyped_storage()

    def close(self, memory: SharedMemory) -> None:
        if has_fault("close_does_nothing"):
            return
        inode, nbytes, _ = _NAME.unpack(memory.payload)
        address, uses = self._mapped.pop(inode)
        if uses > 1:
            self._mapped[inode] = (address, uses - 1)
        else:
            torch.ops.simdev.unmap_segment(address, nbytes)


class SimMemory(TorchMemory):
    sharing_class: ClassVar[type[Sharing] | None] = SimSharing

    def limits(self) -> dict[str, Capability]:
        limits = super().limits()
        del limits["host_alloc"]
        return limits

    def host_alloc(self, nbytes: int) -> HostBuffer:
        check_nbytes(nbytes)
        memory = map_pages(nbytes)
        if not has_fault("host_memory_is_pageable"):
            torch.ops.simdev.adopt_pinned(memory.ctypes.data, memory.nbytes)
        weakref.finalize(memory, _forget, memory.ctypes.data)
        return HostBuffer(memory, is_pinned=True)

    def stats(self) -> MemoryStats:
        shown = get_device("simdev:0").memory if has_fault("statistics_of_another_device") else self
        return TorchMemory.stats(shown)

    def revoke(self, handle: IpcHandle, *, timeout_s: float = 30.0) -> None:
        if not has_fault("revoke_does_nothing"):
            super().revoke(handle, timeout_s=timeout_s)


def _forget(address: int) -> None:
    torch.accelerator.synchronize()  # no copy is on its way from or to it
    torch.ops.simdev.forget_pinned(address)


class SimStreams(TorchStreams):
    def capabilities(self) -> dict[str, Capability]:
        found = super().capabilities()
        native = Capability("native", self._device.evidence)
        return dict.fromkeys(found, native) if has_fault("capabilities_lie") else found


class SimCollectives(TorchCollectives):
    """What gloo reduces, which simccl asks."""

    native_ops: ClassVar = frozenset({"sum", "product", "min", "max", *BITWISE_OPS})
    native_dtypes: ClassVar = frozenset(
        {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8}
    )


class SimDevice(GenericTorchDevice):
    """One of the simulated devices."""

    memory_class: ClassVar[type[TorchMemory]] = SimMemory
    streams_class: ClassVar[type[TorchStreams]] = SimStreams
    collectives_class: ClassVar[type[TorchCollectives]] = SimCollectives
    evidence: ClassVar[Evidence] = "simulated"

    def seed(self, value: int) -> None:
        devices = range(self.count()) if has_fault("seed_reaches_other_devices") else [self.index]
        for index in devices:
            GenericTorchDevice.seed(get_device(f"simdev:{index}"), value)

    @classmethod
    def probe(cls, spec: DeviceSpec) -> Probe:
        if has_fault("probe_initializes"):
            torch.get_device_module("simdev").init()
        return super().probe(spec)
