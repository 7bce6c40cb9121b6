"""The reductions of collective libraries, by the name of their ``torch.distributed`` back end.

Each set holds on every supported torch. It is data, so that a device that is described by a ``DeviceSpec`` alone is
declared as well as one that a vendor has written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BITWISE_OPS = ("band", "bor", "bxor")
_ARITHMETIC = frozenset({"sum", "product", "min", "max"})
_COMMON_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8}
)


@dataclass(frozen=True, slots=True)
class NativeReductions:
    """The library reduces each of ``dtypes`` by each of ``ops``, except the pairs in ``but_not``."""

    ops: frozenset[str]
    dtypes: frozenset[torch.dtype]
    but_not: frozenset[tuple[str, torch.dtype]] = frozenset()


MINIMUM = NativeReductions(_ARITHMETIC, frozenset({torch.float32, torch.int32}))
"""The reductions of a library that is not known here."""

# 8-bit floats are left out: NCCL has them on some GPUs, and rounds to them after each addition. Torch gives the factor
# of premul_sum as a float32, of which NCCL reads the two bytes of a bfloat16: 0.5 was 0 on torch 2.11.
_NCCL = NativeReductions(
    _ARITHMETIC | {"avg", "premul_sum"}, _COMMON_DTYPES, frozenset({("premul_sum", torch.bfloat16)})
)

BY_LIBRARY = {
    # The same from torch 2.10 to 2.15. Gloo accepts bool, but can leave bytes other than 0 and 1.
    "gloo": NativeReductions(_ARITHMETIC | {"avg", *BITWISE_OPS}, _COMMON_DTYPES),
    "nccl": _NCCL,  # also the name that torch has for RCCL
    "rccl": _NCCL,
    # By the tables in torch-xpu-ops; it has avg over some versions of oneCCL only.
    "xccl": NativeReductions(_ARITHMETIC, _COMMON_DTYPES),
    # By its reference for the A2 and A3 series. torch_npu averages by a sum and a division of its own, and sends bool
    # as bytes; rlcore.collectives.groups reduces both, as on other devices.
    "hccl": NativeReductions(
        _ARITHMETIC,
        frozenset(
            {torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8},
        ),
        frozenset({("product", torch.bfloat16), ("product", torch.int16)}),
    ),
}
