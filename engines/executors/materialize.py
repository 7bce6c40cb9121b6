"""Give a module on the meta device its values: each rank reads its own part of every tensor, and nothing else."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rlcore._torch_private import own_buffers, own_parameters
from rlcore.engines.executors.pieces import own_pieces, read_piece
from rlcore.engines.offload.storages import owned
from rlcore.errors import CheckpointError
from rlcore.nn import TrainModule
from rlcore.weights.adapters import adapted_layers, adapter_names, base_name, fresh_adapter
from rlcore.weights.shards import like, local_part, own_box
from rlcore.weights.source import WeightSource
from rlcore.weights.view import WeightPart


def materialize(
    module: TrainModule,
    source: WeightSource,
    device: torch.device,
    *,
    seed: int,
    placed: Callable[[nn.Parameter], None] = lambda parameter: None,
) -> list[nn.Parameter]:
    """Put real parameters in place of the meta ones, with the same sharding; tied parameters stay tied.

    Args:
        seed: for the random numbers of fresh parameters: the same on every rank, for any number of ranks.
        placed: is called with each new parameter, before the next one takes memory.

    Returns:
        The parameters whose values the source has; others are fresh.

    Raises:
        CheckpointError: a parameter is missing, unexpected, or of another shape; a buffer has no values.
    """
    reader = SourceReader(module, source)
    reader.check()
    found: list[nn.Parameter] = []
    for old, names in names_by_parameter(module).items():
        local = torch.empty([side.stop - side.start for side in own_box(old)], device=device, dtype=old.dtype)
        if not (is_found := reader.read(old, local)):
            local.copy_(_fresh(module, names[0], seed)[own_box(old)])
        new = nn.Parameter(like(old, local), requires_grad=old.requires_grad)
        for name in names:
            owner, leaf = owner_of(module, name)
            own_parameters(owner)[leaf] = new
        placed(new)
        found += [new] * is_found
    for name, buffer in module.named_buffers():
        owner, leaf = owner_of(module, name)
        own_buffers(owner)[leaf] = owned(reader.buffer(name, buffer).to(device))
    return found


def retype(module: nn.Module, trained: torch.dtype, frozen: torch.dtype) -> None:
    """Give meta parameters their dtypes; tied ones stay tied."""
    converted: dict[nn.Parameter, nn.Parameter] = {}
    for submodule in module.modules():
        for name, old in own_parameters(submodule).items():
            if old is not None:
                dtype = trained if old.requires_grad else frozen
                converted.setdefault(old, nn.Parameter(old.detach().to(dtype), requires_grad=old.requires_grad))
                own_parameters(submodule)[name] = converted[old]


def read_again(module: TrainModule, source: WeightSource, names: Iterable[str]) -> None:
    """Overwrite parameters of a materialized module by the values of its source, which has them."""
    reader = SourceReader(module, source)
    for parameter in map(module.get_parameter, names):
        reader.read(parameter, local_part(parameter.detach()))


def lacking(module: TrainModule, source: WeightSource, names: Iterable[str]) -> list[str]:
    """Return the names of the parameters that the source does not have, or not all of."""
    reader = SourceReader(module, source)
    return [name for name in names if not reader.has(module.get_parameter(name))]


class SourceReader:
    """Finds a module's tensors in a source: by the module's names, or as the weights of a checkpoint."""

    def __init__(self, module: TrainModule, source: WeightSource) -> None:
        self._module = module
        self._source = source
        layers = adapted_layers(module)
        self._names = {
            id(parameter): [*names, *(base_name(layers, name) or name for name in names)]
            for parameter, names in names_by_parameter(module).items()
        }
        self._weights = [*module.weight_views("base"), *(module.weight_views("only") if layers else ())]
        self._parts: dict[int, list[tuple[str, WeightPart]]] = {}
        for weight in self._weights:
            for part in weight.parts:
                self._parts.setdefault(id(part.parameter), []).append((weight.name, part))

    def has(self, parameter: Tensor) -> bool:
        """Return True if the source has all of a parameter."""
        parts = self._parts.get(id(parameter), [])
        return self._stored_name(parameter) is not None or (
            bool(parts) and all(name in self._source for name, _ in parts)
        )

    def _stored_name(self, parameter: Tensor) -> str | None:
        return next((name for name in self._names[id(parameter)] if name in self._source), None)

    def read(self, parameter: Tensor, local: Tensor) -> bool:
        """Fill this rank's part of a parameter; False if the source does not have it, or not all of it."""
        if not self.has(parameter):
            return False
        source = self._source
        # copied to the device in the file's dtype: nothing is converted on the host
        if name := self._stored_name(parameter):
            if local.numel():
                local.copy_(source[name].read(own_box(parameter)).to(local.device))
            return True
        for name, part in self._parts[id(parameter)]:
            for box, piece in own_pieces(part.view, parameter, local):
                piece.copy_(read_piece(source[name].read, part, box).to(local.device))
        return True

    def buffer(self, name: str, buffer: Tensor) -> Tensor:
        names = [name, *(weight.name for weight in self._weights if weight.parameter is buffer)]
        return next((self._source[found].read(()) for found in names if found in self._source), buffer)

    def check(self) -> None:
        """Raise CheckpointError, with all that differs, unless the source has this module's tensors."""
        module, source = self._module, self._source
        shapes = {weight.name: weight.view.shape for weight in self._weights if weight.parts}
        missing: list[str] = []
        for parameter, names in names_by_parameter(module).items():
            shapes |= dict.fromkeys(self._names[id(parameter)], parameter.shape)
            if source.keys().isdisjoint(self._names[id(parameter)]) and not _starts_fresh(module, names[0]):
                stored = [name for name, _ in self._parts.get(id(parameter), [])] or names[:1]
                missing += [name for name in stored if name not in source]
        buffers = dict(module.named_buffers())
        # a converting loader has itself decided what to leave out
        unexpected = [] if source.is_whole else sorted(source.keys() - shapes.keys() - buffers.keys())
        if missing or unexpected:
            raise CheckpointError(
                f"the weights do not fit {type(module).__name__}: missing {missing}, unexpected {unexpected}. "
                "Parameters that start fresh go into the class attribute `new_parameters`."
            )
        for name in source.keys() & shapes.keys():
            if source[name].shape != shapes[name]:
                raise CheckpointError(
                    f"{name} has shape {list(shapes[name])}; the checkpoint has {list(source[name].shape)}"
                )
        for name, buffer in buffers.items():
            if buffer.is_meta and self.buffer(name, buffer) is buffer:
                raise CheckpointError(
                    f"buffer {name} of {type(module).__name__} has no values; make the module under "
                    "rlcore.meta_device(), which leaves buffers real"
                )


def names_by_parameter(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return each parameter once, with every name it has."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds a parameter or buffer, and its name there."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def _starts_fresh(module: TrainModule, name: str) -> bool:
    return name.startswith(module.new_parameters) or name in adapter_names(module)


def _fresh(module: nn.Module, name: str, seed: int) -> Tensor:
    """Return a whole parameter on the host: of an adapter as peft starts it, else by its owner's
    ``reset_parameters``."""
    owner, leaf = owner_of(module, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.rpartition(".")[0].encode(), seed & 0xFFFFFFFF))
        if name in adapter_names(module):
            return fresh_adapter(module, name)
        if not hasattr(owner, "reset_parameters"):
            raise CheckpointError(
                f"the checkpoint has no {name}, and {type(owner).__name__} no reset_parameters() to start it with"
            )
        own = {id(held): nn.Parameter(torch.empty(held.shape)) for held in owner.parameters(recurse=False)}
        fresh: Any = copy.deepcopy(owner, own)
        fresh.reset_parameters()
    value: Tensor = fresh.get_parameter(leaf).detach()
    return value
