"""The manifest numbers the parameters, and says where in them each weight is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rlcore.engines.weight_sync.planning.manifest import RankParameters, describe, dtype_of
from rlcore.errors import SyncError
from rlcore.nn import TrainModule, WeightView


@pytest.fixture
def mesh() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_a_real_sharded_tensor(mesh: DeviceMesh) -> None:
    local = torch.randn(5, 3)
    by_rows = DTensor.from_local(local, mesh, [Shard(0)])
    by_columns = DTensor.from_local(local, mesh, [Shard(1)])
    meta = torch.empty(5, 3, device="meta")
    source = describe([WeightView("a", by_rows, meta), WeightView("b", by_columns, meta)], 1)
    assert [weight.parameter for weight in source.manifest.weights] == [0, 1]
    assert source.manifest.layouts == (((0, 5),), ((0, 5, 0, 3),))
    assert [part.data_ptr() for part in source.parts()] == [local.data_ptr()] * 2


class Packed(TrainModule):
    """Two experts in one parameter, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.embed = nn.Parameter(torch.randn(2, 3, 4)), nn.Parameter(torch.randn(5, 4))
        self.strided = nn.Parameter(torch.randn(4, 6).t())

    def weight_views(self) -> Any:
        whole = torch.empty(2, 3, 4, device="meta")
        for expert in range(2):
            yield WeightView(f"experts.{expert}", self.experts, whole[expert].t())
        for name in ("embed", "head"):
            yield WeightView(name, self.embed, torch.empty(5, 4, device="meta"))
        yield WeightView("strided", self.strided, torch.empty(6, 4, device="meta"))


def test_weights_are_places_in_parameters() -> None:
    module = Packed()
    source: RankParameters = describe(module.weight_views(), 3)
    manifest = source.manifest
    assert [(weight.parameter, weight.offset, weight.stride) for weight in manifest.weights] == [
        (0, 0, (1, 4)),
        (0, 12, (1, 4)),
        (1, 0, (4, 1)),
        (1, 0, (4, 1)),
        (None, 0, (4, 1)),  # its memory is not row by row
    ]
    assert manifest.layouts == (((0, 2),) * 3, ((0, 5),) * 3)
    assert [part.data_ptr() for part in source.parts()] == [module.experts.data_ptr(), module.embed.data_ptr()]
    assert manifest.weights[1].nbytes == 3 * 4 * 4


def test_a_scalar_is_one_row() -> None:
    scalar = nn.Parameter(torch.tensor(2.0))
    manifest = describe([WeightView("scale", scalar, torch.empty((), device="meta"))], 2).manifest
    assert manifest.layouts == (((0, 1), (0, 1)),)
    assert manifest.parameters[0].numel == manifest.parameters[0].held((0, 1)).numel == 1


@pytest.mark.parametrize("name", ["float31", "Tensor", ""])
def test_an_unknown_dtype_is_refused(name: str) -> None:
    with pytest.raises(SyncError, match=f"^'{name}' is no dtype of this torch "):
        dtype_of(name)
