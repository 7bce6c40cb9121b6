"""What a train worker's module holds, as its sender asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import is_

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rlcore.compute_dtype import stop_computing
from rlcore.engines.weight_sync.planning.manifest import Manifest, Source, describe
from rlcore.nn import TrainModule
from rlcore.weights.view import WeightView, whole


class ModuleHolding:
    """Of one rank of a module that is sharded over ``num_ranks``.

    It is looked through once a round, by ``parts()``: models have tens of thousands of parameters.
    """

    def __init__(self, module: TrainModule, num_ranks: int) -> None:
        self._module = module
        self._num_ranks = num_ranks
        self._known: list[nn.Parameter] = []
        self._views: list[WeightView] = []
        self._source: Source | None = None
        self._parts: list[Tensor] = []

    @property
    def manifest(self) -> Manifest:
        return self._described.manifest

    def parts(self) -> list[Tensor]:
        source = self._look()
        present = [part.data_ptr() for part in source.local_parameters()]
        if present != [part.data_ptr() for part in self._parts]:  # what was refilled in place is in the same storage
            self._parts = source.parts()
        return self._parts

    @torch.no_grad()
    def compute(self, weights: Sequence[int]) -> list[Tensor]:
        self._look()
        views = [self._views[number] for number in weights]
        try:
            return list(map(_computed, views))
        finally:
            for release in {view.release for view in views if view.release is not None}:
                release()

    def changes(self) -> list[int]:
        return [part._version for part in self._parts]

    @property
    def _described(self) -> Source:
        return self._source or self._look()

    def _look(self) -> Source:
        """Described anew when the module has other parameters."""
        present = _resharded(self._module)
        if self._source is None or len(present) != len(self._known) or not all(map(is_, present, self._known)):
            self._views = list(self._module.weight_views())
            self._source = describe(self._views, self._num_ranks)
            self._known, self._parts = present, []
        return self._source


def _resharded(root: nn.Module) -> list[nn.Parameter]:
    """All parameters, after what FSDP keeps gathered behind a forward without a backward was freed."""
    stop_computing(root)
    modules = list(_modules(root))
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()
    return [found for module in modules for found in module._parameters.values() if found is not None]


def _modules(root: nn.Module) -> Iterator[nn.Module]:
    """In some order; several times as fast as ``root.modules()``."""
    seen, waiting = {id(root)}, [root]
    while waiting:
        module = waiting.pop()
        yield module
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


def _computed(found: WeightView) -> Tensor:
    """A whole weight that the manifest has no rows of."""
    if found.compute is not None:
        return found.compute().contiguous()
    assert found.parameter is not None
    gathered = whole(found.parameter.detach()).contiguous()
    view = found.view
    offset = gathered.storage_offset() + int(view.storage_offset())
    return gathered.as_strided(view.shape, view.stride(), offset).contiguous()
