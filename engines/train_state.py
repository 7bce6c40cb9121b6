"""Everything a checkpoint must hold for an exact resume, taken from a module and put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlcore.engines.checkpoint import Checkpoint
from rlcore.engines.named_tensors import mismatch
from rlcore.errors import CheckpointError


def optimizers_of(module: nn.Module) -> dict[str, Optimizer]:
    """Every attribute of the module that is an optimizer."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Optimizer)}


def schedulers_of(module: nn.Module) -> dict[str, LRScheduler]:
    """Every attribute of the module that is a learning-rate scheduler."""
    return {name: value for name, value in vars(module).items() if isinstance(value, LRScheduler)}


def capture(module: nn.Module, device: Any) -> Checkpoint:
    """Weights, optimizers, schedulers and random generators."""
    optimizer_tensors: dict[str, Tensor] = {}
    optimizer_values: dict[str, Any] = {}
    for name, optimizer in optimizers_of(module).items():
        optimizer_values[name] = _split_optimizer(name, optimizer, optimizer_tensors)
    return Checkpoint(
        tensors={
            "weights": dict(_named_values(module)),
            "optimizer": optimizer_tensors,
            "rng": {"cpu": torch.get_rng_state(), "device": device.rng_state()},
        },
        state={
            "optimizers": optimizer_values,
            "schedulers": {name: _plain(value.state_dict()) for name, value in schedulers_of(module).items()},
            "python_rng": random.getstate(),
        },
    )


def check(checkpoint: Checkpoint, module: nn.Module) -> None:
    """Raise CheckpointError, before anything is changed, unless the checkpoint is one of this module."""
    if found := mismatch(dict(_named_values(module)), checkpoint.tensors["weights"]):
        raise CheckpointError(f"the checkpoint is of another model than {type(module).__name__}: {found}")
    held = {"optimizers": optimizers_of(module).keys(), "schedulers": schedulers_of(module).keys()}
    for kind, names in held.items():
        if (saved := checkpoint.state[kind].keys()) != names:
            raise CheckpointError(f"the checkpoint has the {kind} {sorted(saved)}; the module has {sorted(names)}")
    for name, optimizer in optimizers_of(module).items():
        own = _group_sizes(optimizer.param_groups)
        given = _group_sizes(checkpoint.state["optimizers"][name]["groups"])
        if own != given:
            raise CheckpointError(
                f"{name} of the checkpoint has groups of {given} parameters; that of the module has {own}"
            )


def _group_sizes(groups: list[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


@torch.no_grad()
def restore(checkpoint: Checkpoint, module: nn.Module, device: Any) -> None:
    """Put a checked checkpoint back, values in place."""
    saved = checkpoint.tensors["weights"]
    for name, value in _named_values(module):
        value.copy_(saved[name])
    for name, optimizer in optimizers_of(module).items():
        optimizer.load_state_dict(_join_optimizer(name, checkpoint))
    for name, scheduler in schedulers_of(module).items():
        scheduler.load_state_dict(checkpoint.state["schedulers"][name])
    torch.set_rng_state(checkpoint.tensors["rng"]["cpu"])
    device.set_rng_state(checkpoint.tensors["rng"]["device"])
    version, internal, gauss = checkpoint.state["python_rng"]
    random.setstate((version, tuple(internal), gauss))


def _named_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, tied ones once, and persistent buffers."""
    yield from module.named_parameters()
    persistent = module.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def _split_optimizer(name: str, optimizer: Optimizer, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Plain values of one optimizer; its tensors go into ``tensors`` as "<optimizer>/<parameter>/<key>"."""
    state = optimizer.state_dict()
    plain: dict[str, dict[str, Any]] = {}
    for index, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{index}/{key}"] = value
            else:
                plain.setdefault(str(index), {})[key] = value
    return {"values": plain, "groups": [_plain(group) for group in state["param_groups"]]}


def _join_optimizer(name: str, checkpoint: Checkpoint) -> dict[str, Any]:
    saved = checkpoint.state["optimizers"][name]
    state: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in saved["values"].items()}
    for path, tensor in checkpoint.tensors["optimizer"].items():
        owner, index, key = path.split("/")
        if owner == name:
            # a copy: the storage of a tensor from a file cannot be freed for an offload
            state.setdefault(int(index), {})[key] = tensor.clone()
    groups = [{key: _tupled(key, value) for key, value in group.items()} for group in saved["groups"]]
    return {"state": state, "param_groups": groups}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Tensors among hyper-parameters (a tensor lr) as numbers."""
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in values.items()}


def _tupled(key: str, value: Any) -> Any:
    # JSON has no tuples; torch compares betas by unpacking, yet writes them back as given
    return tuple(value) if key == "betas" else value
