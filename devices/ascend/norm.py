"""RMSNorm by the vendor's operator, which ``rlcore.rms_norm`` puts into modules.

Declared: the operator's schema is compared with the wheels, and the call ran on a simulation of its description.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    result: Tensor = torch.ops.npu.npu_rms_norm(x, weight, epsilon=eps)[0]
    return result
