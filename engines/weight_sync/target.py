"""The target of a receiver: the weights of one worker of an inference engine, as that engine holds them.

An executor's worker implements ``Target``; a module whose parameters have the checkpoint's names has ``ModuleTarget``.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlcore.device import Device
from rlcore.errors import InvalidInputError, SyncError
from rlcore.kernels.strided_copy.quantized import QuantizedMatrices
from rlcore.weights.catalog import named_tensors, stored_tensors
from rlcore.weights.names import mismatch

Weights = Iterable[tuple[str, Tensor]]
LoadWeights = Callable[[Weights], object]


class Target(ABC):
    """All of an engine's weights, or a tensor-parallel shard; its methods are called in the process that holds them."""

    device: Device
    """The rlcore device of ``tensors()``."""
    is_plain: ClassVar[bool] = False
    """The loader copies and does nothing else, now or later: plans need no self-test."""

    @abstractmethod
    def meta_model(self) -> tuple[nn.Module, LoadWeights]:
        """Return a second instance of the engine's model on the meta device, and the engine's own loader of it.

        The loader is called once, with all weights on meta, to see what it copies where; nothing live is touched.
        """

    def checkpoint(self) -> Mapping[str, Tensor] | None:
        """Return the weights that the engine was made from, on meta, by the names that its loader knows.

        None says that they are not known. They are asked for where a trainer's weights fill a tensor in part: what
        these leave unwritten too is padding.
        """
        return None

    def identity(self) -> str | None:
        """Return a text that differs wherever the engine's loader, or what it does after loading, might.

        With it a plan that has passed its self-test is kept on disk for later programs (``planning/plan_cache``). None
        keeps nothing.
        """
        return None

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the live parameters and buffers, by their names in the meta model.

        One that is missing, or of another shape, dtype or stride than there, is written by ``reload`` only.
        """

    def quantized(self) -> Mapping[str, QuantizedMatrices]:
        """Return the live matrices that the engine has quantised to float8 as it loaded them.

        They have the names of the meta model, where they are in the dtype that the engine's loader copies. What is not
        named here, and is of another dtype there, is written by ``reload`` only.
        """
        return {}

    @abstractmethod
    def reload(self, weights: Weights) -> None:
        """Load into the live model by the engine's own load, with what it does after loading.

        It is called with all weights, or with those alone that no plan can copy; inside ``reloading()`` with one part
        of them after the other.
        """

    def reloading(self) -> AbstractContextManager[None]:
        """Return what is entered before the first part is given to ``reload``, and left after the last."""
        return nullcontext()

    @abstractmethod
    def committed(self, version: int) -> None:
        """Drop what comes from earlier weights, such as prefix caches: the weights are whole, and of this version."""


class ModuleTarget(Target):
    """A module that takes each weight as it is, by the parameter's own name or by the name in checkpoints."""

    is_plain = True

    def __init__(self, module: nn.Module, device: Device) -> None:
        self.device = device
        self._module = module
        self._reloaded: dict[str, Tensor] | None = None

    def meta_model(self) -> tuple[nn.Module, LoadWeights]:
        meta = meta_copy(self._module)
        return meta, lambda weights: load_by_name(meta, weights)

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in named_tensors(self._module)}

    def reload(self, weights: Weights) -> None:
        own = self._by_every_name() if self._reloaded is None else self._reloaded
        for name, tensor in weights:
            own[name].copy_(tensor)

    @contextmanager
    def reloading(self) -> Iterator[None]:
        self._reloaded = self._by_every_name()  # once: it takes seconds where there are thousands of experts
        try:
            yield
        finally:
            self._reloaded = None

    def _by_every_name(self) -> dict[str, Tensor]:
        return stored_tensors(self._module) | self.tensors()

    def committed(self, version: int) -> None:
        """Drop nothing: a module keeps nothing of earlier weights."""


class NamedTensorsModule(nn.Module):
    """Named tensors as a module that computes nothing, whatever the names are.

    Args:
        tensors: are kept, and written in place.

    Raises:
        InvalidInputError: there is none, one is no dense tensor, or they are on several devices.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors = dict(tensors)
        if not self._tensors:
            raise InvalidInputError("WeightReceiver takes at least one named tensor, got an empty mapping")
        for name, tensor in self._tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
                raise InvalidInputError(
                    f"WeightReceiver takes a mapping of names to tensors; {name!r} is {type(tensor).__name__}"
                    + (": give this rank's part, to_local()" if isinstance(tensor, DTensor) else "")
                )
        if len(devices := {str(tensor.device) for tensor in self._tensors.values()}) > 1:
            raise InvalidInputError(
                f"WeightReceiver takes tensors on one device, got some on each of {', '.join(sorted(devices))}; "
                "make a receiver for each device"
            )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the tensors, which stand for parameters."""
        yield from self._tensors.items()  # type: ignore[misc]


def meta_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module with parameters and buffers on meta; tied ones stay tied, and no values are copied."""
    tensors = [*module.parameters(), *module.buffers()]
    memo: dict[int, object] = {id(tensor): _on_meta(tensor) for tensor in tensors}
    return copy.deepcopy(module, memo)


def _on_meta(tensor: Tensor) -> Tensor:
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(meta, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


@torch.no_grad()
def load_by_name(module: nn.Module, weights: Weights) -> None:
    """Copy each weight into the parameter of its name, or the part of one that has its name in checkpoints.

    Raises:
        SyncError: names or shapes differ; nothing is written then.
    """
    given, own = dict(weights), dict[str, Tensor](module.named_parameters())
    if given.keys() != own.keys():
        own = stored_tensors(module)
    if found := mismatch(own, given):
        raise SyncError(
            f"the trainer's model is not the inference engine's, which still serves its old weights: {found}"
        )
    for name, parameter in own.items():
        parameter.copy_(given[name])
