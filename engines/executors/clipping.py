"""Gradients scaled down to a norm, and steps of torch's optimizers that do not make the host wait for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from rlcore.engines._torch_private import divide_all, reads_found_inf
from rlcore.weights.shards import local_part

_NORM_EPS = 1e-6
"""The same as in ``torch.nn.utils.clip_grads_with_norm_``."""


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm over all ranks, the same on each.

    ``torch.nn.utils.get_total_norm`` dispatches every one of hundreds of sharded tensors in Python, and the device
    waited 8 ms: here it gets local tensors. Those that are cut along the same dimensions of a mesh are summed at once.
    """
    if not [gradient for gradient in gradients if isinstance(gradient, DTensor)]:
        return torch.nn.utils.get_total_norm(gradients)
    by_cut: dict[tuple[tuple[DeviceMesh, int], ...], list[Tensor]] = {}
    for gradient in gradients:
        by_cut.setdefault(_cut(gradient), []).append(local_part(gradient))
    if by_cut.keys() <= {()}:
        return torch.nn.utils.get_total_norm(by_cut.get((), []))
    squares = []
    for cut, parts in by_cut.items():
        squared = torch.nn.utils.get_total_norm(parts).square()
        for mesh, dim in cut:
            dist.all_reduce(squared, group=mesh.get_group(dim))
        squares.append(squared)
    return torch.stack(squares).sum().sqrt()


def _cut(gradient: Tensor) -> tuple[tuple[DeviceMesh, int], ...]:
    """Return the dimensions of the mesh along which ranks hold other elements."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh, placements = gradient.device_mesh, gradient.placements
    return tuple((mesh, dim) for dim, one in enumerate(placements) if not isinstance(one, Replicate))


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
