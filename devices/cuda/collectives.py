"""NCCL: collectives of GPU memory over NVLink, PCIe and networks."""

from __future__ import annotations

from typing import ClassVar, final

import torch

from rlcore.devices.collectives import TorchCollectives


@final
class NcclCollectives(TorchCollectives):
    """8-bit floats are emulated: NCCL has them on some GPUs, and rounds to them after each addition."""

    native_ops: ClassVar = frozenset({"sum", "avg", "product", "min", "max", "premul_sum"})
    native_dtypes: ClassVar = frozenset(
        {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8}
    )
    # torch gives the factor as a float32, of which NCCL reads the two bytes of a bfloat16: 0.5 was 0 on torch 2.11.
    not_native: ClassVar = frozenset({("premul_sum", torch.bfloat16)})
