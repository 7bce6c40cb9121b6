"""The elements of a weight that a rank has, where its parameter is cut in any dimension."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlcore.engines.executors.pieces import own_pieces
from rlcore.weights.shards import own_box

WHOLE = torch.arange(4 * 6 * 5).view(4, 6, 5)
"""Such as four experts, gate and up in one."""
VIEWS: dict[str, Any] = {
    "all": lambda whole: whole,
    "turned": lambda whole: whole.transpose(0, 2),
    "one expert's up": lambda whole: whole[2, 3:],
    "its columns": lambda whole: whole[1].t()[1:4],
    "heads": lambda whole: whole.view(24, 5).unflatten(0, (8, 3)),
    "every other": lambda whole: whole[::2, 1::2],
    "one number": lambda whole: whole[3, 5, 4],
}
LAYOUTS: list[list[Any]] = [
    [Shard(0), Replicate()],
    [Shard(1), Replicate()],
    [Shard(0), Shard(1)],
    [Shard(1), Shard(2)],
    [Replicate(), Shard(2)],
    [_StridedShard(0, split_factor=3), Shard(0)],
    [_StridedShard(1, split_factor=3), Shard(1)],
]


def parts_by_rank(placements: list[Any]) -> Iterator[DTensor]:
    for rank in range(6):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
        try:
            mesh = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]])
            layout: dict[str, Any] = {"run_check": False, "shape": WHOLE.shape, "stride": WHOLE.stride()}
            box = own_box(DTensor.from_local(torch.empty(0), mesh, placements, **layout))
            yield DTensor.from_local(WHOLE[box].contiguous(), mesh, placements, **layout)
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_the_pieces_of_all_ranks_are_the_weight(placements: list[Any]) -> None:
    found: dict[str, tuple[Tensor, Tensor]] = {
        name: (torch.full_like(view(WHOLE), -1), torch.zeros_like(view(WHOLE))) for name, view in VIEWS.items()
    }
    for part in parts_by_rank(placements):
        for name, view in VIEWS.items():
            values, times = found[name]
            for box, tensor in own_pieces(view(WHOLE.to("meta")), part):
                values[box] = tensor
                times[box] += 1
    for name, (values, times) in found.items():
        assert torch.equal(values, VIEWS[name](WHOLE)), name
        copies = 3 if placements[1] == Replicate() else 2 if placements[0] == Replicate() else 1
        assert (times == copies).all(), name
