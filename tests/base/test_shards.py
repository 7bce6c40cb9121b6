"""Which rows of a sharded tensor each rank holds, as torch deals them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlcore.weights.shards import own_box, rows_of_ranks


def rows(mesh: list[Any], placements: list[Any], size: int) -> Any:
    """The rows of a parameter on six ranks; a DTensor of so many ranks needs as many processes."""
    device_mesh = SimpleNamespace(mesh=torch.tensor(mesh))
    parameter: Any = SimpleNamespace(
        device_mesh=device_mesh, placements=placements, shape=torch.Size([size]), dim=lambda: 1
    )
    return rows_of_ranks(parameter, 6)


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


@pytest.mark.parametrize("size", [1, 7, 12])
@pytest.mark.parametrize(
    "placements", [[Replicate(), Shard(0)], [Shard(0), Shard(0)], [Shard(0), Replicate()]], ids=str
)
def test_each_rank_counts_its_own_rows_as_all_others_do(placements: list[Any], size: int) -> None:
    found, of_all = [], set()
    for rank in range(6):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
        try:
            mesh = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]])
            local = torch.empty(0, 4)
            sharded = DTensor.from_local(local, mesh, placements, run_check=False, shape=(size, 4), stride=(4, 1))
            rows, columns = own_box(sharded)
            found.append((rows.start, rows.stop))
            of_all.add(rows_of_ranks(sharded, 6))
            assert columns == slice(0, 4)
        finally:
            dist.destroy_process_group()
    assert of_all == {tuple(found)}
