"""Gradients scaled down to a norm, and steps of torch's optimizers that do not make the host wait for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from rlcore.engines._torch_private import divide_all, reads_found_inf
from rlcore.weights.shards import local_part

_NORM_EPS = 1e-6
"""The same as in ``torch.nn.utils.clip_grads_with_norm_``."""


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm over all ranks, the same on each.

    ``torch.nn.utils.get_total_norm`` dispatches every one of hundreds of sharded tensors in Python, and the device
    waited 8 ms: here it gets local tensors.
    """
    norm = torch.nn.utils.get_total_norm([local_part(gradient) for gradient in gradients])
    sharded = next((gradient for gradient in gradients if isinstance(gradient, DTensor)), None)
    if sharded is None:
        return norm
    shard_dim = next(dim for dim, placement in enumerate(sharded.placements) if isinstance(placement, Shard))
    squared = norm.square()
    dist.all_reduce(squared, group=sharded.device_mesh.get_group(shard_dim))
    return squared.sqrt()


def clip_and_step(
    optimizers: Collection[Optimizer], gradients: Sequence[Tensor], norm: Tensor, max_norm: float | None
) -> None:
    """Clip gradients and step, unless the norm is not finite.

    Fused optimizers scale gradients as they read them, and read on the device if they are to step, as under torch's
    GradScaler. Others take one more pass over the gradients, and the host waits for the norm.
    """
    is_finite = torch.isfinite(norm)
    divisor = None if max_norm is None else ((norm + _NORM_EPS) / max_norm).clamp(min=1.0).float()
    if not all(map(_decides_on_device, optimizers)):
        if not is_finite:
            return
        if divisor is not None:
            divide_all([local_part(gradient) for gradient in gradients], divisor)
        for optimizer in optimizers:
            optimizer.step()
        return
    for optimizer in optimizers:
        asking: Any = optimizer
        asking.grad_scale, asking.found_inf = divisor, (~is_finite).float()
        try:
            optimizer.step()
        finally:
            del asking.grad_scale, asking.found_inf


def _decides_on_device(optimizer: Optimizer) -> bool:
    """Return True if the optimizer can skip a step by a flag on the device.

    SGD is left out: a skipped first step would leave its momentum as uninitialized memory.
    """
    return reads_found_inf(optimizer) and not isinstance(optimizer, torch.optim.SGD)
