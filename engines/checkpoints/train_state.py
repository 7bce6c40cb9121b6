"""The state of a module that an exact resume needs: taken for a checkpoint, and put back from one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from rlcore.device import Device
from rlcore.engines.checkpoints.checkpoint import Checkpoint
from rlcore.engines.checkpoints.damage import DamageError, damage_of
from rlcore.engines.checkpoints.manifest import NAME as MANIFEST
from rlcore.engines.checkpoints.optimizer_states import (
    OptimizerState,
    ParameterLabel,
    StatefulOptimizer,
    check_optimizer,
    check_optimizer_tensors,
    labels,
    like_own,
    plain_numbers,
    restore_optimizer,
    split_optimizer,
)
from rlcore.engines.checkpoints.plain_values import tagged, untagged
from rlcore.engines.checkpoints.random_states import random_states, random_states_of, setter_of_random_states
from rlcore.engines.checkpoints.saved_tensor import SavedTensor, TensorPart
from rlcore.errors import CheckpointError
from rlcore.nn import optimizers_of, schedulers_of
from rlcore.tensor_data import dtype_name
from rlcore.weights.adapters import adapter_names
from rlcore.weights.names import Shaped, listed, mismatch
from rlcore.weights.shards import local_part, own_box

_GROUPS = ("weights", "optimizer", "rng")


class PlainState(msgspec.Struct):
    """The plain values that a training checkpoint has beside tensors."""

    optimizers: dict[str, OptimizerState]
    schedulers: dict[str, dict[str, Any]]
    random_states_of: str
    """The number and kind of the workers."""
    extra: dict[str, Any]
    """The user's own."""
    left_out: list[str] | None = None
    """The weights that are as the module's source gave them, and are read there; None in earlier checkpoints."""


@dataclass(frozen=True, slots=True)
class TrainState:
    """A saved state that was checked completely against a module."""

    tensors: Mapping[str, Mapping[str, SavedTensor]]
    plain: PlainState
    left_out: Sequence[str]
    """The weights that are to be read from the module's source."""
    set_random_states: Callable[[], None]
    warnings: Sequence[str]
    """To be logged once it is loaded."""


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
    left_out: Collection[str]
    """The names of further weights, which are left to the module's source."""
    labels: Mapping[int, ParameterLabel]
    """By the ``id`` of the module's parameters."""
    optimizers: Mapping[str, StatefulOptimizer]
    schedulers: Mapping[str, LRScheduler]


def trained(module: nn.Module, left_out: Collection[str]) -> Trained:
    """Return what a checkpoint holds of a module whose parameters and optimizers torch knows."""
    weights = {name: value for name, value in named_values(module) if name not in left_out}
    optimizers: Mapping[str, Any] = optimizers_of(module)
    return Trained(type(module).__name__, weights, left_out, labels(module), optimizers, schedulers_of(module))


def capture(found: Trained, device: Device) -> Captured:
    """Take the state of weights, optimizers, schedulers and random generators.

    Raises:
        InvalidInputError: an optimizer or a scheduler has a state that would not come back equal.
    """
    optimizer_tensors: dict[str, Tensor | TensorPart] = {}
    optimizer_values: dict[str, Any] = {}
    for name, optimizer in found.optimizers.items():
        optimizer_values[name] = split_optimizer(name, optimizer, found.labels, optimizer_tensors)
    return Captured(
        tensors={"weights": found.weights, "optimizer": optimizer_tensors, "rng": random_states(device)},
        state={
            "optimizers": tagged(optimizer_values, "optimizers"),
            "schedulers": tagged(
                {name: plain_numbers(value.state_dict()) for name, value in found.schedulers.items()}, "schedulers"
            ),
            "random_states_of": random_states_of(device),
            "left_out": sorted(found.left_out),
        },
    )


def check(checkpoint: Checkpoint, own: Trained, device: Device, base: Collection[str]) -> TrainState:
    """Check that all of the checkpoint can be put into this module; nothing is changed.

    Args:
        own: nothing is left out.
        base: the weights that are left out of a checkpoint which does not say so itself, unless it has them.

    Raises:
        DamageError: it lacks a part of a training checkpoint.
        CheckpointError: it belongs to another module.
    """
    manifest = checkpoint.folder / MANIFEST
    if missing := [group for group in _GROUPS if group not in checkpoint.tensors]:
        raise DamageError(manifest, f"its groups must be {', '.join(_GROUPS)}; it has no {missing[0]}")
    with damage_of(manifest):
        plain = msgspec.convert(_untagged(checkpoint), PlainState, str_keys=True)
    saved = checkpoint.tensors["weights"]
    left_out = {name for name in base if name not in saved} if plain.left_out is None else set(plain.left_out)
    expected = {name: value for name, value in own.weights.items() if name not in left_out}
    given: dict[str, Shaped] = {**dict.fromkeys(left_out - own.weights.keys(), torch.empty(0)), **saved}
    if found := mismatch(expected, given):
        raise CheckpointError(f"the checkpoint is of another model than {own.module_name}: {found}")
    _check_names("optimizers", plain.optimizers.keys(), own.optimizers.keys())
    _check_names("schedulers", plain.schedulers.keys(), own.schedulers.keys())
    for name, optimizer in own.optimizers.items():
        check_optimizer(name, optimizer, own.labels, plain.optimizers[name], manifest)
    check_optimizer_tensors(checkpoint.tensors["optimizer"], own.optimizers)
    return TrainState(
        checkpoint.tensors,
        plain,
        sorted(left_out),
        setter_of_random_states(checkpoint.tensors["rng"], plain.random_states_of, device),
        list(_warnings_of_rounding(saved, expected)),
    )


def without_source(state: TrainState, names: Collection[str], module_name: str) -> TrainState:
    """Return what can be put back although the module's source does not have the weights ``names``.

    Raises:
        CheckpointError: they were in the source when the checkpoint was written.
    """
    shown = listed(names)
    if state.plain.left_out is not None:
        raise CheckpointError(
            f"the checkpoint leaves weights to the source of {module_name}, which does not have them any more: "
            f"{shown}; give the module the source that it had when the checkpoint was written"
        )
    warning = (
        f"the checkpoint was written before frozen weights that are not in the source of {module_name} were saved: "
        f"{shown} stay as they were before it was loaded"
    )
    return replace(
        state,
        left_out=[name for name in state.left_out if name not in names],
        warnings=[*state.warnings, warning],
    )


def _untagged(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the plain state without tags; the user's values, and the format before, have none."""
    if checkpoint.manifest.stamp is None:
        return checkpoint.state
    return {key: value if key == "extra" else untagged(value) for key, value in checkpoint.state.items()}


def _check_names(kind: str, saved: Collection[str], held: Collection[str]) -> None:
    if saved != held:
        raise CheckpointError(f"the checkpoint has the {kind} {sorted(saved)}; the module has {sorted(held)}")


def _warnings_of_rounding(saved: Mapping[str, SavedTensor], own: Mapping[str, Tensor | TensorPart]) -> Iterator[str]:
    kinds = Counter((saved[name].dtype, _dtype_of(own[name])) for name in own)
    for (given, held), count in kinds.items():
        if _loses_digits(given, held):
            yield (
                f"{count} of the checkpoint's {len(own)} weights are {dtype_name(given)} and were rounded to "
                f"{dtype_name(held)}, the dtype that they have in this engine; to keep their digits build it with "
                f"dtype={dtype_name(given)!r}, and where they are frozen with compute_dtype={dtype_name(given)!r}"
            )


def _dtype_of(held: Tensor | TensorPart) -> torch.dtype:
    return held.tensor.dtype if isinstance(held, TensorPart) else held.dtype


def _loses_digits(given: torch.dtype, held: torch.dtype) -> bool:
    if not (given.is_floating_point and held.is_floating_point):
        return False
    before, after = torch.finfo(given), torch.finfo(held)
    return after.eps > before.eps or after.max < before.max


@torch.no_grad()
def restore(state: TrainState, module: nn.Module) -> None:
    """Put a checked state back; tensors are filled in place, but those of weights that it leaves out."""
    weights = state.tensors["weights"]
    by_id = {number: weights[name] for number, (name, _) in labels(module).items() if name in weights}
    for name, optimizer in optimizers_of(module).items():  # first: a class of the user's may refuse what it is given
        restore_optimizer(name, optimizer, state.plain.optimizers[name], state.tensors["optimizer"], by_id)
    for name, scheduler in schedulers_of(module).items():
        scheduler.load_state_dict(like_own(scheduler.state_dict(), state.plain.schedulers[name]))
    for name, value in named_values(module):
        if name in weights:
            local_part(value).copy_(weights[name].read(own_box(value)))
    state.set_random_states()


def named_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, tied ones once, and persistent buffers, by name."""
    yield from module.named_parameters()
    persistent = module.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def base_names(module: nn.Module) -> list[str]:
    """Return the names of the frozen weights under adapters, most of which are as the module's source gave them."""
    adapters = adapter_names(module)
    frozen = (name for name, value in module.named_parameters() if not value.requires_grad)
    return [name for name in frozen if adapters and name not in adapters]
