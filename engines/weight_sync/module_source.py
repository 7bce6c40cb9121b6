"""The weights of a module, as a sender asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rlcore._torch_private import numbers_of_writes, own_modules, own_tensors
from rlcore.compute_dtype import stop_computing
from rlcore.engines.weight_sync.planning.manifest import RankParameters, WeightManifest, describe
from rlcore.nn import TrainModule
from rlcore.weights.catalog import model_weights
from rlcore.weights.view import WeightView, whole


class ModuleSourceTensors:
    """The ``SourceTensors`` of one rank of a module that is sharded over ``num_ranks``.

    The module is looked through once a round, by ``parts()``: models have tens of thousands of parameters.

    Args:
        views: gives the weights with the parameters as they are sharded; None is ``weight_views()`` of a
            ``TrainModule``, and ``model_weights()`` of another module.
        release: frees what is gathered; None does so for FSDP.
    """

    def __init__(
        self,
        module: nn.Module,
        num_ranks: int,
        *,
        views: Callable[[], Iterable[WeightView]] | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        self._module = module
        self._num_ranks = num_ranks
        own_views = module.weight_views if isinstance(module, TrainModule) else model_weights(module)
        self._weight_views: Callable[[], Iterable[WeightView]] = views or own_views
        self._release = release
        self._known: list[Tensor] = []
        """The parameters and persistent buffers that were described."""
        self._layouts: list[tuple[torch.dtype, torch.Size, tuple[int, ...]]] = []
        """Their dtypes, shapes and strides then."""
        self._views: list[WeightView] = []
        self._parameters: RankParameters | None = None
        self._parts: list[Tensor] = []

    @property
    def manifest(self) -> WeightManifest:
        return self._described.manifest

    def refresh(self) -> None:
        """Do nothing: ``parts()`` looks at the module."""

    def forget(self) -> None:
        """Hold no tensor until the next ``parts()``."""
        self._known, self._layouts, self._views, self._parameters, self._parts = [], [], [], None, []

    def parts(self) -> list[Tensor]:
        source = self._refresh()
        present = [part.data_ptr() for part in source.local_parameters()]
        if present != [part.data_ptr() for part in self._parts]:  # what was refilled in place is in the same storage
            self._parts = source.parts()
        return self._parts

    @torch.no_grad()
    def compute(self, weights: Sequence[int]) -> list[Tensor]:
        self._refresh()
        views = [self._views[number] for number in weights]
        try:
            return list(map(_computed, views))
        finally:
            for release in {view.release for view in views if view.release is not None}:
                release()

    def changes(self) -> list[int]:
        return numbers_of_writes(chain(self._parts, self._known))  # a write through a DTensor is not its part's

    @property
    def _described(self) -> RankParameters:
        return self._parameters or self._refresh()

    def _refresh(self) -> RankParameters:
        """Return the description of the module, a new one when it has other tensors, or one is laid out otherwise."""
        modules = _modules(self._module)
        if self._release is None:
            _reshard(self._module, modules)
        else:
            self._release()
        present = own_tensors(modules)
        layouts = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in present]
        is_known = layouts == self._layouts and all(map(is_, present, self._known))
        if self._parameters is None or not is_known:
            self._views = list(self._weight_views())
            self._parameters = describe(self._views, self._num_ranks)
            self._known, self._layouts, self._parts = present, layouts, []
        return self._parameters


def _reshard(root: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Free what FSDP keeps gathered after a forward without a backward."""
    stop_computing(root)
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()


def _modules(root: nn.Module) -> list[nn.Module]:
    """Return all modules in any order; several times as fast as ``root.modules()``."""
    found, seen = [root], {id(root)}
    for module in found:  # it grows meanwhile
        for child in own_modules(module).values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def _computed(found: WeightView) -> Tensor:
    """Return a whole weight that the manifest has no rows of, contiguous."""
    if found.compute is not None:
        return found.compute().contiguous()
    assert found.parameter is not None
    gathered = whole(found.parameter).contiguous()
    view = found.view
    offset = gathered.storage_offset() + int(view.storage_offset())
    return gathered.as_strided(view.shape, view.stride(), offset).contiguous()
