"""The manifest says which rank has which rows, as torch deals them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from rlcore.engines.weight_sync.planning.manifest import Source, _sharded_rows, describe, dtype_of
from rlcore.errors import SyncError
from rlcore.nn import TrainModule, WeightView


def rows(mesh: list[Any], placements: list[Any], size: int) -> Any:
    """Of a parameter on six ranks; a DTensor of so many ranks needs as many processes."""
    parameter: Any = SimpleNamespace(device_mesh=SimpleNamespace(mesh=torch.tensor(mesh)), placements=placements)
    return _sharded_rows(parameter, size, 6)


@pytest.mark.parametrize("size", [1, 2, 4, 7, 37, 600])
def test_rows_are_dealt_as_torch_chunks_them(size: int) -> None:
    chunks = [(int(part[0]), int(part[-1]) + 1) for part in torch.arange(size).chunk(6)]
    found = rows([0, 1, 2, 3, 4, 5], [Shard(0)], size)
    assert [one for one in found if one[0] < one[1]] == chunks
    assert all(one == (size, size) for one in found[len(chunks) :])  # ranks that have none


def test_replicas_have_the_same_rows() -> None:
    assert rows([[0, 1, 2], [3, 4, 5]], [Replicate(), Shard(0)], 7) == ((0, 3), (3, 6), (6, 7)) * 2
    assert rows([[0, 2, 4], [1, 3, 5]], [Replicate(), Shard(0)], 7) == ((0, 3), (0, 3), (3, 6), (3, 6), (6, 7), (6, 7))


def test_rows_are_dealt_twice() -> None:
    assert rows([[0, 1, 2], [3, 4, 5]], [Shard(0), Shard(0)], 7) == ((0, 2), (2, 4), (4, 4), (4, 5), (5, 6), (6, 7))


@pytest.mark.parametrize("placement", [Shard(1), Partial()], ids=str)
def test_other_shardings_are_sent_whole(placement: Any) -> None:
    assert rows([0, 1, 2, 3, 4, 5], [placement], 8) is None


def test_ranks_outside_of_a_mesh_have_nothing() -> None:
    assert rows([4, 1], [Shard(0)], 4) == ((0, 0), (2, 4), (0, 0), (0, 0), (0, 2), (0, 0))


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
    assert [weight.parameter for weight in source.manifest.weights] == [0, None]
    assert source.manifest.layouts == (((0, 5),),)
    (part,) = source.parts()
    assert part.data_ptr() == local.data_ptr()


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
    source: Source = describe(module.weight_views(), 3)
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
    assert (manifest.parameters[0].row_numel, manifest.parameters[0].numel) == (1, 1)


@pytest.mark.parametrize("name", ["float31", "Tensor", ""])
def test_an_unknown_dtype_is_refused(name: str) -> None:
    with pytest.raises(SyncError, match=f"^'{name}' is no dtype of this torch "):
        dtype_of(name)
