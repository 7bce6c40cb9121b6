"""Gloo: collectives over sockets, of host memory."""

from __future__ import annotations

from typing import ClassVar, final

import torch

from rlcore.devices.collectives import BITWISE_OPS, Collectives


@final
class GlooCollectives(Collectives):
    """Newer torch has an average of its own over gloo, of float tensors: a sum and a division, as here."""

    native_ops: ClassVar = frozenset({"sum", "product", "min", "max", *BITWISE_OPS})
    native_dtypes: ClassVar = frozenset(
        {torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8}
    )
