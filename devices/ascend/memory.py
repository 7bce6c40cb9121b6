"""Memory of NPUs, through ``torch.npu``: ``torch.accelerator`` supports its allocator only from torch 2.13 on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, final

import torch

from rlcore.devices.ascend.npu import npu
from rlcore.devices.ascend.sharing import AscendSharing, why_no_ipc
from rlcore.devices.ipc.sharing import Sharing
from rlcore.devices.memory import TorchMemory
from rlcore.errors import UnsupportedError
from rlcore.types import Capability, IpcHandle, MemoryInfo, MemoryStats

_ND = frozenset({-1, 2})
"""Memory formats in which strides describe a tensor: undefined, and ACL_FORMAT_ND."""


@final
class AscendMemory(TorchMemory):
    sharing_class: ClassVar[type[Sharing] | None] = AscendSharing

    def limits(self) -> dict[str, Capability]:
        limits, evidence = super().limits(), self._device.evidence
        if "pool" not in limits and not hasattr(npu().MemPool, "snapshot"):
            reason = "this torch_npu cannot tell what a MemPool holds; torch-npu 2.13 can"
            limits["pool"] = Capability("unsupported", evidence, reason)
        if reason := why_no_ipc():
            unshared = Capability("unsupported", evidence, reason)
            limits |= dict.fromkeys(("export_ipc", "import_ipc", "revoke", "ledger"), unshared)
        return limits

    def info(self) -> MemoryInfo:
        free, total = npu().mem_get_info(self._device.index)
        return MemoryInfo(int(free), int(total))

    def stats(self) -> MemoryStats:
        return MemoryStats(
            allocated_bytes=npu().memory_allocated(self._device.index),
            reserved_bytes=npu().memory_reserved(self._device.index),
            peak_allocated_bytes=npu().max_memory_allocated(self._device.index),
        )

    def reset_peak(self) -> None:
        npu().reset_peak_memory_stats(self._device.index)

    def empty_cache(self) -> None:
        npu().ipc_collect()  # frees blocks whose importers have closed
        for pool in self._pools.values():
            pool.empty_cache()
        npu().empty_cache()

    def export_ipc_together(self, tensors: Sequence[torch.Tensor]) -> tuple[list[IpcHandle], list[tuple[int, int]]]:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "npu":
                check_format(tensor)
        return super().export_ipc_together(tensors)


def check_format(tensor: torch.Tensor) -> None:
    """Refuse a tensor in a memory format of the vendor (NZ, NC1HWC0, ...), which other processes could not read.

    Raises:
        UnsupportedError: names the format and the cast.
    """
    found = torch.ops.npu.get_npu_format(tensor)
    if found not in _ND:
        raise UnsupportedError(
            f"sharing a tensor in NPU memory format {found}",
            "its memory is in an order of the vendor's own; torch_npu.npu_format_cast(tensor, 2) gives plain strides",
        )
