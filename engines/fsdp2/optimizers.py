"""Optimizers and schedulers that ``train_batch`` cannot step, refused before it changes anything."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from rlcore.errors import UnsupportedError
from rlcore.nn import TrainModule, optimizers_of, schedulers_of


def check_schedulers(module: TrainModule) -> None:
    """Refuse what ``train_batch`` cannot step: it would fail when the weights have changed already."""
    for name, scheduler in schedulers_of(module).items():
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise UnsupportedError(
                f"{name} of {_class_name(module)}, a ReduceLROnPlateau,",
                "train_batch() steps schedulers without a metric; keep it in a list of the module, and step it by a "
                "method of the module",
            )


def check_sharded(module: TrainModule) -> None:
    """Refuse optimizers that torch cannot run on sharded parameters: it would, after a backward, name an operator."""
    for name, optimizer in optimizers_of(module).items():
        if refused := _refused(optimizer):
            what, remedy = refused
            raise UnsupportedError(
                f"{name} of {_class_name(module)}, {what}, on several workers",
                f"torch has no such step of sharded parameters; {remedy}",
            )


def _refused(optimizer: Optimizer) -> tuple[str, str] | None:
    """Return what cannot step sharded parameters, and what to do instead."""
    if isinstance(optimizer, torch.optim.Adafactor | torch.optim.Rprop):
        return f"torch's {type(optimizer).__name__}", "use torch.optim.AdamW there"
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    if is_fused and isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad):
        return f"an {type(optimizer).__name__} with fused=True", "leave fused out"
    return None


def _class_name(module: nn.Module) -> str:
    """Return the name of the user's class, of which FSDP makes another one."""
    return next(one.__name__ for one in type(module).__mro__ if not issubclass(one, FSDPModule))
