"""HCCL: collectives of NPU memory over HCCS, PCIe and RoCE."""

from __future__ import annotations

from typing import Any, final

from rlcore.devices.collectives import TorchCollectives
from rlcore.errors import UnsupportedError


@final
class HcclCollectives(TorchCollectives):
    """HCCL over torch_npu."""

    def _options(self, timeout_s: float, is_high_priority: bool) -> Any:
        """Return torch_npu's options. It replaces all fields but ``hccl_config`` when it makes a group."""
        if is_high_priority:
            raise UnsupportedError(
                f"a high-priority stream of collectives on {self._device.name}",
                "torch_npu replaces is_high_priority_stream by False when it makes a group",
            )
        import torch_npu  # type: ignore[import-not-found]

        return torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
