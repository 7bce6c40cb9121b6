"""Gloo: collectives of host memory over sockets."""

from __future__ import annotations

from typing import ClassVar, final

import torch

from rlcore.devices.collectives import BITWISE_OPS, TorchCollectives


@final
class GlooCollectives(TorchCollectives):
    """Gloo's reductions, the same from torch 2.10 to 2.15. It accepts bool, but can leave bytes other than 0 and 1."""

    native_ops: ClassVar = frozenset({"sum", "avg", "product", "min", "max", *BITWISE_OPS})
    native_dtypes: ClassVar = frozenset(
        {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8}
    )
