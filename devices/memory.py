"""Memory of a device over torch: totals, this process's use, pinned host memory, copies, and IPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from rlcore._torch_private import copy_all
from rlcore.arguments import LIST, optional
from rlcore.device import Device, HostMemory, Memory
from rlcore.devices.copy_batch import Batch
from rlcore.devices.host_memory import HostBuffer, check_nbytes
from rlcore.devices.ipc.exporter import exporter
from rlcore.devices.ipc.mapping import Mapping
from rlcore.devices.ipc.sharing import Sharing
from rlcore.devices.ipc.tensors import OnRevoke, TensorIpc
from rlcore.devices.part import TorchPart
from rlcore.devices.pool import Pool
from rlcore.devices.streams import STREAM
from rlcore.errors import InvalidInputError, first_line
from rlcore.tensor_data import dtype_name
from rlcore.types import Capability, IpcExport, IpcHandle, MemoryInfo, MemoryStats

_OF_ALLOCATOR = ("info", "stats", "reset_peak", "empty_cache")
"""Members that ``torch.accelerator`` answers, by asking the allocator of the back end."""


def _is_lack(error: RuntimeError) -> bool:
    """Return True for torch's answer that a back end does not have a function, False for a failure of one."""
    return isinstance(error, NotImplementedError) or "is not a DeviceAllocator" in str(error)


def _lack(error: RuntimeError) -> str:
    return f"torch.accelerator does not have it here: {first_line(error)}"


class TorchMemory(TorchPart, Memory):
    """Memory through ``torch.accelerator``, which covers CUDA, ROCm, XPU, MPS and out-of-tree back ends."""

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
    """The vendor's IPC of memory; None where it has none."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._ipc = TensorIpc(device, self.sharing_class(device)) if self.sharing_class else None
        self._pools: dict[str, Pool] = {}
        self._refused: dict[str, str] = {}
        """Member -> torch's reason, where only the call could tell."""

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
                f"{self._device.spec.name} names no devices.ipc.sharing.Sharing, by which processes open its memory"
            )
            unshared = Capability("unsupported", evidence, reason)
            limits |= dict.fromkeys(("export_ipc", "import_ipc", "revoke", "ledger"), unshared)
        refused = self._without_allocator() | self._refused
        return limits | {member: Capability("unsupported", evidence, reason) for member, reason in refused.items()}

    def _without_allocator(self) -> dict[str, str]:
        """Return member -> reason for those that ``torch.accelerator`` does not have here. It initialises nothing."""
        if hasattr(torch.get_device_module(self._device.type), "mem_get_info"):
            return {}  # such back ends have an allocator that torch.accelerator can ask
        inherited = [one for one in _OF_ALLOCATOR if getattr(type(self), one) is getattr(TorchMemory, one)]
        try:
            if inherited:
                torch.accelerator.memory_stats(self._torch_device)
        except RuntimeError as error:
            if _is_lack(error):
                return dict.fromkeys(inherited, _lack(error))
        return {}

    def info(self) -> MemoryInfo:
        module = torch.get_device_module(self._torch_device)
        if hasattr(module, "mem_get_info"):
            free, total = module.mem_get_info(self._torch_device)
        else:
            free, total = self._ask("info", torch.accelerator.get_memory_info, self._torch_device)
        return MemoryInfo(int(free), int(total))

    def stats(self) -> MemoryStats:
        found = self._ask("stats", torch.accelerator.memory_stats, self._torch_device)
        return MemoryStats(
            allocated_bytes=found.get("allocated_bytes.all.current", 0),
            reserved_bytes=found.get("reserved_bytes.all.current", 0),
            peak_allocated_bytes=found.get("allocated_bytes.all.peak", 0),
        )

    def reset_peak(self) -> None:
        self._ask("reset_peak", torch.accelerator.reset_peak_memory_stats, self._torch_device)

    def empty_cache(self) -> None:
        for pool in self._pools.values():
            pool.empty_cache()
        self._ask("empty_cache", torch.accelerator.empty_cache)

    def _ask(self, member: str, function: Callable[..., Any], *arguments: object) -> Any:
        """Call a function of ``torch.accelerator``. Raises UnsupportedError where the back end does not have it."""
        try:
            return function(*arguments)
        except RuntimeError as error:
            if not _is_lack(error):
                raise
            self._refused[member] = _lack(error)
            raise self.unsupported(member) from error

    def pool(self, tag: str) -> Pool:
        if "pool" in self.limits():
            raise self.unsupported("pool")
        if not isinstance(tag, str) or not tag:
            raise InvalidInputError(f"pool takes a tag such as 'weights', got {tag!r}")
        return self._pools.setdefault(tag, Pool(tag, self._torch_device))

    def host_alloc(self, nbytes: int) -> HostBuffer:
        check_nbytes(nbytes)
        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return HostBuffer(pinned.numpy(), is_pinned=pinned.is_pinned())

    def host_free(self, buffer: HostMemory) -> None:
        if not isinstance(buffer, HostBuffer):
            raise InvalidInputError(f"host_free takes what host_alloc returned, got {type(buffer).__name__}")
        self._device.synchronize()
        buffer.free()

    @torch.no_grad()
    def copy_batch(
        self, dst: Sequence[torch.Tensor], src: Sequence[torch.Tensor], stream: torch.Stream | None = None
    ) -> None:
        batch = Batch(dst, src, self._torch_device)
        if batch.dst.tensors:
            with self._device.streams.use(stream or self._device.streams.current()):
                self._copy(batch)

    def export_ipc(self, tensor: torch.Tensor) -> IpcHandle:
        (whole,), ((_, first),) = self.export_ipc_together([tensor])
        return replace(
            whole,
            storage_offset_bytes=first,
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
        )

    def export_ipc_together(self, tensors: Sequence[torch.Tensor]) -> tuple[list[IpcHandle], list[tuple[int, int]]]:
        return self._sharing("export_ipc").export_tensors(tensors)

    def import_ipc(self, handle: IpcHandle, on_revoke: OnRevoke | None = None, *, timeout_s: float = 30.0) -> Mapping:
        return self._sharing("import_ipc").import_tensors([handle], on_revoke, timeout_s)[0]

    def import_ipc_together(
        self, handles: Sequence[IpcHandle], on_revoke: OnRevoke | None = None, *, timeout_s: float = 30.0
    ) -> list[Mapping]:
        return self._sharing("import_ipc").import_tensors(handles, on_revoke, timeout_s)

    def revoke(self, handle: IpcHandle, *, timeout_s: float = 30.0) -> None:
        self._sharing("revoke").revoke(handle, timeout_s)

    def ledger(self) -> list[IpcExport]:
        uuid = self._sharing("ledger").uuid
        return [export for export in exporter().ledger() if export.device_uuid == uuid]

    @property
    def can_pin(self) -> bool:
        return True

    def _copy(self, batch: Batch) -> None:
        """Queue the copies on the current stream."""
        copy_all(batch.dst.tensors, batch.src.tensors, non_blocking=True)

    def _sharing(self, member: str) -> TensorIpc:
        if self._ipc is None:
            raise self.unsupported(member)
        return self._ipc

    @property
    def _torch_device(self) -> torch.device:
        return self._device.torch_device
