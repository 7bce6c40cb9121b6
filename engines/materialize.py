"""Give a module on the meta device its values: each rank reads its own part of every tensor, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlcore.engines.sharding import like, own_box
from rlcore.engines.weight_source import TensorSlices, WeightSource
from rlcore.errors import CheckpointError
from rlcore.nn import TrainModule, owned


def materialize(module: TrainModule, source: WeightSource, device: torch.device, dtype: torch.dtype) -> None:
    """Put real parameters in place of the meta ones, sharded as they are; tied parameters stay one.

    Raises:
        CheckpointError: a parameter is missing, unexpected, or of another shape; a buffer has no values.
    """
    names_of = names_by_parameter(module)
    buffers = dict(module.named_buffers())
    _check(module, source, names_of, buffers)
    for old, names in names_of.items():
        found = next((name for name in names if name in source), None)
        whole = _fresh(module, names[0], device) if found is None else source[found]
        local = _local_part(old, whole, device, dtype)
        new = nn.Parameter(like(old, local), requires_grad=old.requires_grad)
        for name in names:
            owner, leaf = owner_of(module, name)
            owner._parameters[leaf] = new
    for name, buffer in buffers.items():
        owner, leaf = owner_of(module, name)
        value = source[name].read(()) if name in source else buffer
        owner._buffers[leaf] = owned(value.to(device))


def names_by_parameter(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Each parameter once, with every name it has."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that holds a parameter or buffer, and its name there."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def _check(
    module: TrainModule,
    source: WeightSource,
    names_of: Mapping[nn.Parameter, list[str]],
    buffers: Mapping[str, Tensor],
) -> None:
    fresh = module.new_parameters
    missing = [
        names[0] for names in names_of.values() if source.keys().isdisjoint(names) and not names[0].startswith(fresh)
    ]
    known = {name for names in names_of.values() for name in names} | buffers.keys()
    # what a converting loader leaves over, it has judged itself
    unexpected = [] if source.is_whole else sorted(source.keys() - known)
    if missing or unexpected:
        raise CheckpointError(
            f"the weights do not fit {type(module).__name__}: missing {missing}, unexpected {unexpected}. Parameters "
            "that start fresh go into the class attribute `new_parameters`."
        )
    for parameter, names in names_of.items():
        for name in source.keys() & names:
            if source[name].shape != parameter.shape:
                raise CheckpointError(
                    f"{name} has shape {list(parameter.shape)}; the checkpoint has {list(source[name].shape)}"
                )
    for name, buffer in buffers.items():
        if buffer.is_meta and name not in source:
            raise CheckpointError(
                f"buffer {name} of {type(module).__name__} has no values; make the module under rlcore.meta_device(), "
                "which leaves buffers real"
            )


def _local_part(old: Tensor, whole: TensorSlices, device: torch.device, dtype: torch.dtype) -> Tensor:
    box = own_box(old)
    local = torch.empty([side.stop - side.start for side in box], device=device, dtype=dtype)
    if local.numel():
        local.copy_(whole.read(box).to(device))  # crosses in the file's dtype: nothing is converted on the host
    return local


def _fresh(module: nn.Module, name: str, device: torch.device) -> TensorSlices:
    """What the owner's ``reset_parameters`` makes of a parameter, the same on all ranks."""
    owner, leaf = owner_of(module, name)
    held = dict(owner._parameters)
    try:
        for key, parameter in held.items():
            if parameter is not None:
                owner._parameters[key] = nn.Parameter(torch.empty(parameter.shape, device=device))
        owner.reset_parameters()  # type: ignore[operator]
        fresh = owner.get_parameter(leaf).detach()
    finally:
        owner._parameters.update(held)
    if dist.is_initialized():
        dist.broadcast(fresh, src=0)
    return TensorSlices(fresh)
