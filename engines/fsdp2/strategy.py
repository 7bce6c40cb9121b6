"""The sharding strategy of the executor ``fsdp2``, which is also that of a plain module on one device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlcore.device import Device
from rlcore.engines._torch_private import divide_all, reads_found_inf
from rlcore.engines.executors.strategy import ShardingStrategy
from rlcore.engines.fsdp2.sharding import gradient_divisor, resharding_afterwards, set_gradient_sync, total_norm
from rlcore.nn import TrainModule, optimizers_of
from rlcore.weights.shards import local_part

_NORM_EPS = 1e-6
"""The same as in ``torch.nn.utils.clip_grads_with_norm_``."""


class Fsdp2Strategy(ShardingStrategy):
    """Parameters and their gradients are DTensors, or plain tensors on one device.

    Args:
        device: the rlcore device; its profiler names the phases.
        reduce_each: exchange gradients after each micro-batch; else after the last one.
    """

    def __init__(self, module: TrainModule, device: Device, *, reduce_each: bool = False) -> None:
        self._module = module
        self._device = device
        self._reduce_each = reduce_each

    def computing(self) -> AbstractContextManager[None]:
        return resharding_afterwards(self._module)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        set_gradient_sync(self._module, self._reduce_each or is_last)
        (loss * gradient_divisor(self._module)).backward()  # type: ignore[no-untyped-call]

    def step(self, max_norm: float | None, seen: Callable[[Tensor], None]) -> None:
        phase = self._device.profiler.range
        with phase("train_batch: clip"):
            gradients = [parameter.grad for parameter in self._module.parameters() if parameter.grad is not None]
            norm = total_norm(gradients)
        with phase("train_batch: metrics"):
            seen(norm)
        with phase("train_batch: optimizer"):
            clip_and_step(optimizers_of(self._module).values(), gradients, norm, max_norm)

    def zero(self) -> None:
        self._module.zero_grad()  # also of parameters that no optimizer has, which would count in the next norm
        for optimizer in optimizers_of(self._module).values():
            optimizer.zero_grad()


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
