"""Everything a checkpoint must hold for an exact resume, taken from a module and put back."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlcore.engines.checkpoints.checkpoint import Checkpoint
from rlcore.engines.checkpoints.saved_tensor import OF_EACH_RANK, SavedTensor
from rlcore.engines.named_tensors import mismatch
from rlcore.engines.sharding import like, local_part, own_box
from rlcore.errors import CheckpointError
from rlcore.weights.adapters import adapter_names

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Captured:
    """What to save: tensors by group and name, as this worker holds them, and plain state."""

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def optimizers_of(module: nn.Module) -> dict[str, Optimizer]:
    """Every attribute of the module that is an optimizer."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Optimizer)}


def schedulers_of(module: nn.Module) -> dict[str, LRScheduler]:
    """Every attribute of the module that is a learning-rate scheduler."""
    return {name: value for name, value in vars(module).items() if isinstance(value, LRScheduler)}


def capture(module: nn.Module, device: Any) -> Captured:
    """Weights, optimizers, schedulers and random generators."""
    optimizer_tensors: dict[str, Tensor] = {}
    optimizer_values: dict[str, Any] = {}
    for name, optimizer in optimizers_of(module).items():
        optimizer_values[name] = _split_optimizer(name, optimizer, optimizer_tensors)
    return Captured(
        tensors={"weights": dict(_named_values(module)), "optimizer": optimizer_tensors, "rng": _random_states(device)},
        state={
            "optimizers": optimizer_values,
            "schedulers": {name: _plain(value.state_dict()) for name, value in schedulers_of(module).items()},
            "random_states_of": _random_states_of(device),
        },
    )


def _world() -> tuple[int, int]:
    """Rank and size."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _random_states(device: Any) -> dict[str, Tensor]:
    """Of this rank; Python's is 625 numbers, and the second of a pair of Gaussian ones if the first has been given."""
    _, internal, gauss = random.getstate()
    states = {
        "cpu": torch.get_rng_state(),
        "device": device.rng_state(),
        "python": torch.tensor(internal),
        "gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    return {f"{OF_EACH_RANK}{_world()[0]}-{name}": value for name, value in states.items()}


def _random_states_of(device: Any) -> str:
    """What they can be given back to."""
    size = _world()[1]
    return f"{size} {device.type} worker{'s' * (size > 1)}"


def _restore_random_states(checkpoint: Checkpoint, device: Any) -> None:
    rank, size = _world()
    if (saved := checkpoint.state["random_states_of"]) != (now := _random_states_of(device)):
        _log.warning(
            "the checkpoint is of %s, and this engine has %s: random generators start from new seeds", saved, now
        )
        first = checkpoint.tensors["rng"][f"{OF_EACH_RANK}0-python"].read()
        seed = int(first[0]) * size + rank
        torch.manual_seed(seed)
        random.seed(seed)
        return
    states = {
        name: checkpoint.tensors["rng"][f"{OF_EACH_RANK}{rank}-{name}"].read()
        for name in ("cpu", "device", "python", "gauss")
    }
    torch.set_rng_state(states["cpu"])
    device.set_rng_state(states["device"])
    gauss = states["gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))


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
        local_part(value).copy_(saved[name].read(own_box(value)))
    for name, optimizer in optimizers_of(module).items():
        optimizer.load_state_dict(_join_optimizer(name, optimizer, checkpoint))
    for name, scheduler in schedulers_of(module).items():
        scheduler.load_state_dict(checkpoint.state["schedulers"][name])
    _restore_random_states(checkpoint, device)


def _named_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, tied ones once, and persistent buffers."""
    left_out = {id(parameter) for parameter in unsaved(module)}
    yield from ((name, value) for name, value in module.named_parameters() if id(value) not in left_out)
    persistent = module.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def unsaved(module: nn.Module) -> list[nn.Parameter]:
    """The base under adapters: frozen, and in the files that the module came from."""
    adapters = adapter_names(module)
    frozen = ((name, value) for name, value in module.named_parameters() if not value.requires_grad)
    return [value for name, value in frozen if adapters and name not in adapters]


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


def _join_optimizer(name: str, optimizer: Optimizer, checkpoint: Checkpoint) -> dict[str, Any]:
    saved = checkpoint.state["optimizers"][name]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in saved["values"].items()}
    for path, tensor in checkpoint.tensors["optimizer"].items():
        owner, index, key = path.split("/")
        if owner == name:
            state.setdefault(int(index), {})[key] = _laid_out_as(parameters[int(index)], tensor)
    groups = [{key: _tupled(key, value) for key, value in group.items()} for group in saved["groups"]]
    return {"state": state, "param_groups": groups}


def _laid_out_as(parameter: Tensor, saved: SavedTensor) -> Tensor:
    if saved.shape != parameter.shape:  # such as the number of steps
        return saved.read()
    return like(parameter, saved.read(own_box(parameter)).to(local_part(parameter).device))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Tensors among hyper-parameters (a tensor lr) as numbers."""
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in values.items()}


def _tupled(key: str, value: Any) -> Any:
    # JSON has no tuples; torch compares betas by unpacking, yet writes them back as given
    return tuple(value) if key == "betas" else value
