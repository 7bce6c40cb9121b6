"""The states of optimizers as checkpoints hold them: plain values by parameter, and tensors in files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlcore.engines.checkpoints.damage import DamageError, damage_of
from rlcore.engines.checkpoints.saved_tensor import SavedTensor, TensorPart
from rlcore.errors import CheckpointError
from rlcore.weights.shards import like, local_part, own_box

ParameterLabel = tuple[str, list[int]]
"""The name of a parameter, "" for one that the module does not have, and its shape."""


class OptimizerState(msgspec.Struct):
    """One optimizer's plain values."""

    values: dict[int, dict[str, Any]]
    """The values by the parameter's number and the value's name."""
    groups: list[dict[str, Any]]
    parameters: list[ParameterLabel] | None = None
    """The labels of the parameters, in the order of their numbers; None in earlier checkpoints."""


class StatefulOptimizer(Protocol):
    """The members of an optimizer that a checkpoint needs."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def state_dict(self) -> dict[str, Any]: ...


def labels(module: nn.Module) -> dict[int, ParameterLabel]:
    """Return the name and the shape of each parameter by its ``id``; tied ones have their first name."""
    return {id(parameter): (name, list(parameter.shape)) for name, parameter in module.named_parameters()}


def split_optimizer(
    name: str,
    optimizer: StatefulOptimizer,
    known: Mapping[int, ParameterLabel],
    tensors: dict[str, Tensor | TensorPart],
) -> dict[str, Any]:
    """Return the plain values of an optimizer; its tensors go into ``tensors`` as "<optimizer>/<parameter>/<key>".

    Args:
        known: the labels of the module's parameters by ``id``.
    """
    state = optimizer.state_dict()
    plain: dict[str, dict[str, Any]] = {}
    for index, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor | TensorPart):
                tensors[f"{name}/{index}/{key}"] = value
            else:
                plain.setdefault(str(index), {})[key] = value
    return {
        "values": plain,
        "groups": [plain_numbers(group) for group in state["param_groups"]],
        "parameters": [list(label) for label in _labels_of(optimizer, known)],
    }


def check_optimizer(
    name: str, optimizer: StatefulOptimizer, known: Mapping[int, ParameterLabel], saved: OptimizerState, manifest: Path
) -> None:
    """Raise unless the saved states are of the parameters of ``optimizer``, in its groups and order.

    Raises:
        DamageError: they do not fit together.
        CheckpointError: they belong to another optimizer.
    """
    with damage_of(manifest):
        given = [len(group.params) for group in msgspec.convert(saved.groups, list[_ParameterGroup])]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if own != given:
        raise CheckpointError(
            f"{name} of the checkpoint has groups of {given} parameters; that of the module has {own}"
        )
    if unknown := [index for index in saved.values if not 0 <= index < sum(own)]:
        raise DamageError(manifest, f"{name} has values of parameter {unknown[0]}, and {sum(own)} parameters")
    if saved.parameters is not None:
        _check_order(name, _labels_of(optimizer, known), saved.parameters)


class _ParameterGroup(msgspec.Struct):
    params: list[int]


def _check_order(name: str, own: Sequence[ParameterLabel], saved: Sequence[ParameterLabel]) -> None:
    """Refuse states of other parameters: they go by numbers, and would have the shapes or values of others."""
    for number, (given, held) in enumerate(zip(saved, own, strict=True)):
        if given != held:
            raise CheckpointError(
                f"the states of {name} in the checkpoint are of other parameters: number {number} is {_shown(given)} "
                f"in the checkpoint, and {_shown(held)} in {name} of the module; make {name} with its parameters in "
                "the order of the one that was saved"
            )


def _shown(label: ParameterLabel) -> str:
    name, shape = label
    return f"{name or 'one that is not of the module'} {shape}"


def check_optimizer_tensors(saved: Mapping[str, SavedTensor], optimizers: Mapping[str, StatefulOptimizer]) -> None:
    """Raise DamageError if a tensor is of no parameter of these optimizers."""
    counts = {name: sum(len(group["params"]) for group in held.param_groups) for name, held in optimizers.items()}
    for path in saved:
        match path.rsplit("/", 2):  # a name may have more
            case [name, index, _] if name in counts and index.isdecimal() and int(index) < counts[name]:
                continue
        raise DamageError(
            Path("optimizer-*.safetensors"), f"{path!r} names no tensor of the optimizers {sorted(optimizers)}"
        )


def restore_optimizer(
    name: str,
    optimizer: Optimizer,
    saved: OptimizerState,
    tensors: Mapping[str, SavedTensor],
    weights: Mapping[int, SavedTensor],
) -> None:
    """Put checked states back.

    Args:
        tensors: of all optimizers.
        weights: the saved parameters by the ``id`` of those of the module.
    """
    parameters = _parameters(optimizer)
    state: dict[int, dict[str, Any]] = {index: dict(values) for index, values in saved.values.items()}
    for path, tensor in tensors.items():
        owner, index, key = path.rsplit("/", 2)
        if owner == name:
            state.setdefault(int(index), {})[key] = _laid_out_as(parameters[int(index)], tensor)
    own = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": like_own(own, hyper_parameters(saved))})
    for number, given in state.items():
        parameter = parameters[number]
        _keep_dtypes(parameter, given, optimizer.state.get(parameter, {}), weights.get(id(parameter)))


def _laid_out_as(parameter: Tensor, saved: SavedTensor) -> Tensor:
    if saved.shape != parameter.shape:  # such as the number of steps
        return saved.read()
    return like(parameter, saved.read(own_box(parameter)).to(local_part(parameter).device))


def _keep_dtypes(
    parameter: Tensor, given: Mapping[str, Any], taken: dict[str, Any], weight: SavedTensor | None
) -> None:
    """Put back the states of a parameter that torch has rounded to its dtype.

    Those that had the dtype and shape of their parameter when they were saved are left in that of the present one.

    Args:
        taken: what the optimizer has made of ``given``.
        weight: the parameter in the checkpoint, None if that does not have it.
    """
    for key, value in given.items():
        held = taken.get(key)
        if not (isinstance(value, Tensor) and isinstance(held, Tensor)):
            continue
        follows = weight is not None and (value.dtype, value.shape) == (weight.dtype, weight.shape)
        if held.dtype == parameter.dtype != value.dtype and not follows:
            taken[key] = value.to(held.device)


def hyper_parameters(saved: OptimizerState) -> list[dict[str, Any]]:
    """Return the groups of a saved optimizer, with the numbers of their parameters."""
    return [{key: _tupled(key, value) for key, value in group.items()} for group in saved.groups]


def plain_numbers(value: Any) -> Any:
    """Return hyper-parameters with tensors among them, such as a tensor lr, as numbers."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, dict) and not isinstance(value, Counter):
        return {key: plain_numbers(item) for key, item in value.items()}
    return type(value)(map(plain_numbers, value)) if type(value) in {list, tuple} else value


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


def _labels_of(optimizer: StatefulOptimizer, known: Mapping[int, ParameterLabel]) -> list[ParameterLabel]:
    return [known.get(id(one), ("", list(one.shape))) for one in _parameters(optimizer)]


def _parameters(optimizer: StatefulOptimizer | Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
