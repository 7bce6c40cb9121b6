"""What a train worker's module holds, as its sender asks for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlcore.engines.sharding import local_part, reshard
from rlcore.engines.sync.source import Manifest, Source, describe
from rlcore.nn import TrainModule
from rlcore.weights.view import WeightView, whole


class ModuleHolding:
    """Of one rank of a module that is sharded over ``num_ranks``."""

    def __init__(self, module: TrainModule, num_ranks: int) -> None:
        self._module = module
        self._num_ranks = num_ranks
        self._known: list[nn.Parameter] = []
        self._views: list[WeightView] = []
        self._source: Source

    @property
    def manifest(self) -> Manifest:
        return self._current().manifest

    def parts(self) -> list[Tensor]:
        return self._current().parts()

    @torch.no_grad()
    def compute(self, weights: Sequence[int]) -> list[Tensor]:
        self._current()
        return [_computed(self._views[number]) for number in weights]

    def changes(self) -> list[int]:
        return [local_part(parameter)._version for parameter in self._parameters()]

    def _parameters(self) -> list[nn.Parameter]:
        reshard(self._module)
        return list(self._module.parameters())

    def _current(self) -> Source:
        """Described anew when the module has other parameters."""
        present = self._parameters()
        if len(present) != len(self._known) or any(a is not b for a, b in zip(present, self._known, strict=True)):
            self._views = list(self._module.weight_views())
            self._source = describe(self._views, self._num_ranks)
            self._known = present
        return self._source


def _computed(found: WeightView) -> Tensor:
    """A whole weight that the manifest has no rows of."""
    if found.compute is not None:
        return found.compute().contiguous()
    assert found.parameter is not None
    gathered = whole(found.parameter.detach()).contiguous()
    view = found.view
    offset = gathered.storage_offset() + int(view.storage_offset())
    return gathered.as_strided(view.shape, view.stride(), offset).contiguous()
