"""The state of a module that an exact resume needs: taken for a checkpoint, and put back from one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlcore.device import Device
from rlcore.engines.checkpoints.checkpoint import Checkpoint
from rlcore.engines.checkpoints.damage import DamageError, damage_of
from rlcore.engines.checkpoints.manifest import NAME as MANIFEST
from rlcore.engines.checkpoints.plain_values import tagged, untagged
from rlcore.engines.checkpoints.random_states import random_states, random_states_of, setter_of_random_states
from rlcore.engines.checkpoints.saved_tensor import SavedTensor, TensorPart
from rlcore.errors import CheckpointError
from rlcore.nn import optimizers_of, schedulers_of
from rlcore.weights.adapters import adapter_names
from rlcore.weights.names import mismatch
from rlcore.weights.shards import like, local_part, own_box

_GROUPS = ("weights", "optimizer", "rng")


class OptimizerState(msgspec.Struct):
    """One optimizer's plain values."""

    values: dict[int, dict[str, Any]]
    """The values by the parameter's number and the value's name."""
    groups: list[dict[str, Any]]


class PlainState(msgspec.Struct):
    """The plain values that a training checkpoint has beside tensors."""

    optimizers: dict[str, OptimizerState]
    schedulers: dict[str, dict[str, Any]]
    random_states_of: str
    """The number and kind of the workers."""
    extra: dict[str, Any]
    """The user's own."""


@dataclass(frozen=True, slots=True)
class TrainState:
    """A saved state that was checked completely against a module."""

    tensors: Mapping[str, Mapping[str, SavedTensor]]
    plain: PlainState
    set_random_states: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Captured:
    """The state to save: tensors by group and name, as this worker holds them, and plain state."""

    tensors: Mapping[str, Mapping[str, Tensor | TensorPart]]
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Trained:
    """The parts of a module that a checkpoint holds, beside random states."""

    module_name: str
    weights: Mapping[str, Tensor | TensorPart]
    """By name, as this worker holds them; parts that are only checked need no values."""
    optimizers: Mapping[str, StatefulOptimizer]
    schedulers: Mapping[str, LRScheduler]


class StatefulOptimizer(Protocol):
    """The members of an optimizer that a checkpoint needs."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def state_dict(self) -> dict[str, Any]: ...


def trained(module: nn.Module) -> Trained:
    """Return what a checkpoint holds of a module whose parameters and optimizers torch knows."""
    optimizers: Mapping[str, Any] = optimizers_of(module)
    return Trained(type(module).__name__, dict(named_values(module)), optimizers, schedulers_of(module))


def capture(found: Trained, device: Device) -> Captured:
    """Take the state of weights, optimizers, schedulers and random generators.

    Raises:
        InvalidInputError: an optimizer or a scheduler has a state that would not come back equal.
    """
    optimizer_tensors: dict[str, Tensor | TensorPart] = {}
    optimizer_values: dict[str, Any] = {}
    for name, optimizer in found.optimizers.items():
        optimizer_values[name] = _split_optimizer(name, optimizer, optimizer_tensors)
    return Captured(
        tensors={"weights": found.weights, "optimizer": optimizer_tensors, "rng": random_states(device)},
        state={
            "optimizers": tagged(optimizer_values, "optimizers"),
            "schedulers": tagged(
                {name: _plain(value.state_dict()) for name, value in found.schedulers.items()}, "schedulers"
            ),
            "random_states_of": random_states_of(device),
        },
    )


def check(checkpoint: Checkpoint, own: Trained, device: Device) -> TrainState:
    """Check that all of the checkpoint can be put into this module; nothing is changed.

    Raises:
        DamageError: it lacks a part of a training checkpoint.
        CheckpointError: it belongs to another module.
    """
    manifest = checkpoint.folder / MANIFEST
    if missing := [group for group in _GROUPS if group not in checkpoint.tensors]:
        raise DamageError(manifest, f"its groups must be {', '.join(_GROUPS)}; it has no {missing[0]}")
    with damage_of(manifest):
        plain = msgspec.convert(_untagged(checkpoint), PlainState, str_keys=True)
    if found := mismatch(own.weights, checkpoint.tensors["weights"]):
        raise CheckpointError(f"the checkpoint is of another model than {own.module_name}: {found}")
    _check_names("optimizers", plain.optimizers.keys(), own.optimizers.keys())
    _check_names("schedulers", plain.schedulers.keys(), own.schedulers.keys())
    for name, optimizer in own.optimizers.items():
        _check_optimizer(name, optimizer, plain.optimizers[name], manifest)
    _check_optimizer_tensors(checkpoint.tensors["optimizer"], own.optimizers)
    return TrainState(
        checkpoint.tensors,
        plain,
        setter_of_random_states(checkpoint.tensors["rng"], plain.random_states_of, device),
    )


def _untagged(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the plain state without tags; the user's values, and the format before, have none."""
    if checkpoint.manifest.stamp is None:
        return checkpoint.state
    return {key: value if key == "extra" else untagged(value) for key, value in checkpoint.state.items()}


def _check_names(kind: str, saved: Collection[str], held: Collection[str]) -> None:
    if saved != held:
        raise CheckpointError(f"the checkpoint has the {kind} {sorted(saved)}; the module has {sorted(held)}")


def _check_optimizer(name: str, optimizer: StatefulOptimizer, saved: OptimizerState, manifest: Path) -> None:
    with damage_of(manifest):
        given = [len(group.params) for group in msgspec.convert(saved.groups, list[_ParameterGroup])]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if own != given:
        raise CheckpointError(
            f"{name} of the checkpoint has groups of {given} parameters; that of the module has {own}"
        )
    if unknown := [index for index in saved.values if not 0 <= index < sum(own)]:
        raise DamageError(manifest, f"{name} has values of parameter {unknown[0]}, and {sum(own)} parameters")


class _ParameterGroup(msgspec.Struct):
    params: list[int]


def _check_optimizer_tensors(saved: Mapping[str, SavedTensor], optimizers: Mapping[str, StatefulOptimizer]) -> None:
    counts = {name: sum(len(group["params"]) for group in held.param_groups) for name, held in optimizers.items()}
    for path in saved:
        match path.rsplit("/", 2):  # a name may have more
            case [name, index, _] if name in counts and index.isdecimal() and int(index) < counts[name]:
                continue
        raise DamageError(
            Path("optimizer-*.safetensors"), f"{path!r} names no tensor of the optimizers {sorted(optimizers)}"
        )


@torch.no_grad()
def restore(state: TrainState, module: nn.Module) -> None:
    """Put a checked state back; tensors are filled in place."""
    for name, optimizer in optimizers_of(module).items():  # first: a class of the user's may refuse what it is given
        optimizer.load_state_dict(_join_optimizer(name, optimizer, state))
    for name, scheduler in schedulers_of(module).items():
        scheduler.load_state_dict(like_own(scheduler.state_dict(), state.plain.schedulers[name]))
    for name, value in named_values(module):
        local_part(value).copy_(state.tensors["weights"][name].read(own_box(value)))
    state.set_random_states()


def named_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, tied ones once, and persistent buffers, by name."""
    left_out = {id(parameter) for parameter in unsaved(module)}
    yield from ((name, value) for name, value in module.named_parameters() if id(value) not in left_out)
    persistent = module.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def unsaved(module: nn.Module) -> list[nn.Parameter]:
    """Return the frozen weights under adapters, which are in the files that the module came from."""
    adapters = adapter_names(module)
    frozen = ((name, value) for name, value in module.named_parameters() if not value.requires_grad)
    return [value for name, value in frozen if adapters and name not in adapters]


def _split_optimizer(
    name: str, optimizer: StatefulOptimizer, tensors: dict[str, Tensor | TensorPart]
) -> dict[str, Any]:
    """Return the plain values of an optimizer; its tensors go into ``tensors`` as "<optimizer>/<parameter>/<key>"."""
    state = optimizer.state_dict()
    plain: dict[str, dict[str, Any]] = {}
    for index, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor | TensorPart):
                tensors[f"{name}/{index}/{key}"] = value
            else:
                plain.setdefault(str(index), {})[key] = value
    return {"values": plain, "groups": [_plain(group) for group in state["param_groups"]]}


def _join_optimizer(name: str, optimizer: Optimizer, checked: TrainState) -> dict[str, Any]:
    saved = checked.plain.optimizers[name]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Any]] = {index: dict(values) for index, values in saved.values.items()}
    for path, tensor in checked.tensors["optimizer"].items():
        owner, index, key = path.rsplit("/", 2)
        if owner == name:
            state.setdefault(int(index), {})[key] = _laid_out_as(parameters[int(index)], tensor)
    own = optimizer.state_dict()["param_groups"]
    return {"state": state, "param_groups": like_own(own, hyper_parameters(saved))}


def hyper_parameters(saved: OptimizerState) -> list[dict[str, Any]]:
    """Return the groups of a saved optimizer, with the numbers of their parameters."""
    return [{key: _tupled(key, value) for key, value in group.items()} for group in saved.groups]


def _laid_out_as(parameter: Tensor, saved: SavedTensor) -> Tensor:
    if saved.shape != parameter.shape:  # such as the number of steps
        return saved.read()
    return like(parameter, saved.read(own_box(parameter)).to(local_part(parameter).device))


def _plain(value: Any) -> Any:
    """Return hyper-parameters with tensors among them, such as a tensor lr, as numbers."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, dict) and not isinstance(value, Counter):
        return {key: _plain(item) for key, item in value.items()}
    return type(value)(map(_plain, value)) if type(value) in {list, tuple} else value


def like_own(own: Any, plain: Any) -> Any:
    """Return plain values with tensors where the module has them."""
    if isinstance(own, Tensor):
        return torch.full_like(own, plain)
    if type(own) is type(plain) is dict:
        return {key: like_own(own.get(key), item) for key, item in plain.items()}
    if type(own) is type(plain) in {list, tuple} and len(own) == len(plain):
        return type(own)(map(like_own, own, plain))
    return plain


def _tupled(key: str, value: Any) -> Any:
    # in rlcore.checkpoint/3 they are a list
    return tuple(value) if key == "betas" else value
