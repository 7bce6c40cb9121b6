"""HCCL: collectives of NPU memory over HCCS, PCIe and RoCE."""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch

from rlcore.devices.collectives import TorchCollectives
from rlcore.errors import UnsupportedError


@final
class HcclCollectives(TorchCollectives):
    """HCCL's reductions, by its reference for the A2 and A3 series.

    torch_npu averages by a sum and a division of its own, and sends bool as bytes. Here ``rlcore.collectives.groups``
    reduces both, as on other devices.
    """

    native_ops: ClassVar = frozenset({"sum", "product", "min", "max"})
    native_dtypes: ClassVar = frozenset(
        {torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8}
    )
    not_native: ClassVar = frozenset({("product", torch.bfloat16), ("product", torch.int16)})

    def _options(self, timeout_s: float, is_high_priority: bool) -> Any:
        """Return torch_npu's options. It replaces all fields but ``hccl_config`` when it makes a group."""
        if is_high_priority:
            raise UnsupportedError(
                f"a high-priority stream of collectives on {self._device.name}",
                "torch_npu replaces is_high_priority_stream by False when it makes a group",
            )
        import torch_npu  # type: ignore[import-not-found]

        return torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
