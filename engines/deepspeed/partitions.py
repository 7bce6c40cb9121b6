"""The parts of parameters that ranks hold under ZeRO 3, as flat tensors, and the weights as views of them.

ZeRO 3 cuts a parameter, numbered row by row, into one chunk of equal size a rank; the last ones are short or empty.
As a DTensor of one dimension that is what torch calls ``Shard(0)``. So weight sync, which takes rows of parameters,
takes elements, and nothing is gathered for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rlcore.engines.executors.materialize import SourceReader
from rlcore.engines.executors.own_mesh import own_mesh
from rlcore.nn import TrainModule
from rlcore.weights.source import WeightSource
from rlcore.weights.view import GATHER, Adapters, WeightPart, WeightView


class Partitions:
    """The parameters of a module as this rank holds them.

    Args:
        config: for ``deepspeed.initialize``; None where the stage partitions no parameters.
    """

    def __init__(self, library: Any, config: dict[str, Any] | None, device: torch.device) -> None:
        self._library = library
        self._config = config
        self._device = device
        self._first: Any = None
        self._flat: dict[int, tuple[Tensor, Tensor]] = {}
        self._mesh: DeviceMesh | None = None
        if config is not None and dist.get_world_size() > 1:
            self._mesh = own_mesh(device.type, {"zero": dist.get_world_size()})

    def place(self, parameter: nn.Parameter) -> None:
        """Partition a whole parameter: this rank keeps its chunk. All ranks call it for the same one.

        Until ``hide_shapes`` it has its shape, and NaN for values.
        """
        if self._config is None:
            return
        if self._first is None:
            holder = nn.Module()
            holder.register_parameter("parameter", parameter)
            self._library.zero.Init(module=holder, config_dict_or_path=self._config, dtype=parameter.dtype)
            self._first = parameter
        else:
            self._first.convert_to_zero_parameters(param_list=[parameter])
        setattr(parameter, GATHER, lambda: self.gathered(parameter))
        _show_shape(parameter)  # the initial values of others may depend on it

    def hide_shapes(self, module: nn.Module) -> None:
        """Leave all partitioned parameters empty, as DeepSpeed expects them; until then they have shapes."""
        for parameter in module.parameters():
            if is_partitioned(parameter):
                _hide_shape(parameter)

    @contextmanager
    def shaped(self, module: nn.Module) -> Iterator[None]:
        """Inside, partitioned parameters have their shapes, and NaN for values; they take no memory."""
        empty = [one for one in module.parameters() if is_partitioned(one) and not one.numel()]
        for parameter in empty:
            _show_shape(parameter)
        try:
            yield
        finally:
            for parameter in empty:
                _hide_shape(parameter)

    def flat(self, parameter: Tensor) -> Tensor:
        """Return a parameter as a tensor of one dimension, a DTensor on several ranks; one that is whole, itself."""
        if not is_partitioned(parameter):
            return parameter
        held: Any = parameter
        chunk, numel = held.ds_tensor, held.ds_numel
        known = self._flat.get(id(parameter))
        if known is None or known[0].data_ptr() != chunk.data_ptr():
            start = min(numel, chunk.numel() * dist.get_rank())
            local = chunk.detach().narrow(0, 0, min(chunk.numel(), numel - start))
            if self._mesh is not None:
                local = DTensor.from_local(
                    local, self._mesh, [Shard(0)], run_check=False, shape=torch.Size([numel]), stride=(1,)
                )
            self._flat[id(parameter)] = known = chunk, local
        return known[1]

    def gathered(self, parameter: Tensor) -> Tensor:
        """Return a whole partitioned parameter, in memory of its own; all ranks call it together."""
        flat, held = self.flat(parameter), parameter
        whole = flat.full_tensor() if isinstance(flat, DTensor) else flat.clone()
        shape: Any = held
        return whole.view(shape.ds_shape)

    def store(self, parameter: Tensor, whole: Tensor) -> None:
        """Keep this rank's chunk of a whole tensor as that of a partitioned parameter."""
        held: Any = parameter
        start = min(held.ds_numel, held.ds_tensor.numel() * dist.get_rank())
        own = whole.reshape(-1)[start : start + held.ds_tensor.numel()]
        held.ds_tensor.data.narrow(0, 0, own.numel()).copy_(own)

    def read_again(self, module: TrainModule, source: WeightSource, names: Iterable[str]) -> None:
        """Overwrite parameters by the values of the module's source, one after the other."""
        with self.shaped(module):
            reader = SourceReader(module, source)
            for parameter in map(module.get_parameter, names):
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
                reader.read(parameter, whole)
                if is_partitioned(parameter):
                    self.store(parameter, whole)
                else:
                    parameter.detach().copy_(whole)

    def weight_views(self, module: TrainModule, adapters: Adapters = "merged") -> Iterator[WeightView]:
        """Yield ``module.weight_views(adapters)``, with the flat tensors of partitioned parameters in their place."""
        with self.shaped(module):
            views = list(module.weight_views(adapters))
        for view in views:
            parameter = None if view.parameter is None else self.flat(view.parameter)
            joined = tuple(WeightPart(part.box, self.flat(part.parameter), part.view) for part in view.joined)
            yield view._replace(parameter=parameter, joined=joined)


def is_partitioned(parameter: Tensor) -> bool:
    return hasattr(parameter, "ds_tensor")


def chunks(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors in whose storages this rank's parts of parameters lie."""
    for parameter in module.parameters():
        held: Any = parameter
        yield held.ds_tensor if is_partitioned(parameter) else parameter


def _show_shape(parameter: nn.Parameter) -> None:
    held: Any = parameter
    nan = torch.full((1,), float("nan"), dtype=parameter.dtype, device=parameter.device)
    parameter.data = nan.expand(held.ds_shape)


def _hide_shape(parameter: nn.Parameter) -> None:
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
