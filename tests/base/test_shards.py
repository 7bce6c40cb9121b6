"""The box of a sharded tensor that each rank holds, as torch deals them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlcore.errors import UnsupportedError
from rlcore.weights.shards import boxes_of_ranks, own_box


def rows(mesh: list[Any], placements: list[Any], size: int) -> Any:
    """The rows of a parameter on six ranks; a DTensor of so many ranks needs as many processes."""
    device_mesh = SimpleNamespace(mesh=torch.tensor(mesh), mesh_dim_names=None)
    device_mesh._get_root_mesh = lambda: device_mesh
    parameter: Any = SimpleNamespace(
        device_mesh=device_mesh, placements=placements, shape=torch.Size([size]), dim=lambda: 1
    )
    return boxes_of_ranks(parameter, 6)


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


def test_partial_sums_are_sent_whole() -> None:
    assert rows([0, 1, 2, 3, 4, 5], [Partial()], 8) is None


def test_ranks_outside_of_a_mesh_have_nothing() -> None:
    assert rows([4, 1], [Shard(0)], 4) == ((0, 0), (2, 4), (0, 0), (0, 0), (0, 2), (0, 0))


@pytest.mark.parametrize("size", [1, 7, 12])
@pytest.mark.parametrize(
    "placements",
    [
        [Replicate(), Shard(0)],
        [Shard(0), Shard(0)],
        [Shard(0), Replicate()],
        [Shard(0), Shard(1)],
        [_StridedShard(0, split_factor=3), Shard(0)],
    ],
    ids=str,
)
def test_each_rank_counts_its_own_box_as_all_others_do(placements: list[Any], size: int) -> None:
    found, of_all = [], set()
    for rank in range(6):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
        try:
            mesh = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]])
            local = torch.empty(0, 4)
            sharded = DTensor.from_local(local, mesh, placements, run_check=False, shape=(size, 4), stride=(4, 1))
            rows, columns = own_box(sharded)
            is_cut = Shard(1) in placements
            found.append((rows.start, rows.stop) + ((columns.start, columns.stop) if is_cut else ()))
            of_all.add(boxes_of_ranks(sharded, 6))
            assert is_cut or columns == slice(0, 4)
        finally:
            dist.destroy_process_group()
    assert of_all == {tuple(found)}


@pytest.mark.parametrize("size", [1, 5, 9, 16])
def test_strided_shards_are_those_of_torch(size: int) -> None:
    """FSDP over tensor parallelism: torch's own split of the rows, and then of what it gives."""
    for fsdp, tp in ((2, 2), (2, 3), (3, 2)):
        ranks = torch.arange(6).view(fsdp, -1)[:, :tp].tolist()
        found = rows(ranks, [_StridedShard(0, split_factor=tp), Shard(0)], size)
        for (place, own), rank in itertools.product(enumerate(ranks), range(tp)):
            pieces, _ = _StridedShard(0, split_factor=tp)._split_tensor(torch.arange(size), fsdp, with_padding=False)
            chunks = pieces[place].chunk(tp)
            want = chunks[rank].tolist() if rank < len(chunks) else []
            assert list(range(*found[own[rank]])) == want


def test_what_is_no_box_has_no_bounds() -> None:
    assert rows([0, 1, 2], [_StridedShard(0, split_factor=2)], 12) is None, "two runs of rows on each rank"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = DeviceMesh("cpu", [0, 1])
        strided = [_StridedShard(0, split_factor=2)]
        tensor = DTensor.from_local(torch.empty(4, 1), mesh, strided, run_check=False, shape=(8, 1), stride=(1, 1))
        with pytest.raises(UnsupportedError, match="what a rank holds of it is no box"):
            own_box(tensor)
    finally:
        dist.destroy_process_group()
