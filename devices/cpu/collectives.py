"""Gloo: collectives over sockets, of host memory."""

from __future__ import annotations

from typing import ClassVar, final

import torch

from rlcore.devices.collectives import BITWISE_OPS, TorchCollectives


@final
class GlooCollectives(TorchCollectives):
    """The same from torch 2.10 to 2.15. It takes bool too, and leaves bytes in it that are neither 0 nor 1."""

    native_ops: ClassVar = frozenset({"sum", "avg", "product", "min", "max", *BITWISE_OPS})
    native_dtypes: ClassVar = frozenset(
        {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8}
    )
