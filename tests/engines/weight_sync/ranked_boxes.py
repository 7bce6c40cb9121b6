"""The ranks of test_plan_boxes.py: FSDP2 over tensor parallelism as torch does it, on four processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fused_model import Share
from test_plan import parameters_of
from test_plan_boxes import EVEN, UNEVEN, assert_is_loaded, plain, tensor_parallel_dim
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rlcore.engines.checkpoints.saved_tensor import open_parts, parts_of, write_parts
from rlcore.engines.checkpoints.tensor_file import Stamp
from rlcore.engines.weight_sync.planning.manifest import RankParameters, describe
from rlcore.nn import WeightView
from rlcore.weights.shards import own_box

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER = Path(os.environ["TEST_STORE"]).parent


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    store = dist.FileStore(os.environ["TEST_STORE"], SIZE)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE, timeout=timedelta(seconds=180))
    yield
    dist.destroy_process_group()


class Whole(nn.Module):
    """Parameters by number."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.held = nn.ParameterList(nn.Parameter(tensor.clone()) for tensor in tensors)


def sharded(tensors: list[Tensor], named: dict[Any, str], mesh: DeviceMesh) -> list[nn.Parameter]:
    module = Whole(tensors)
    for number, parameter in enumerate(module.held):
        dim = tensor_parallel_dim(named[number])
        placement = Replicate() if dim is None else Shard(dim)
        module.held[number] = nn.Parameter(distribute_tensor(parameter.detach(), mesh["tp"], [placement]))
    fully_shard(module, mesh=mesh["fsdp"])
    return list(module.parameters())


def described(parameters: list[nn.Parameter], sizes: Any) -> RankParameters:
    manifest = plain(sizes)[0]
    views = []
    for weight in manifest.weights:
        assert weight.parameter is not None
        meta = torch.empty(manifest.parameters[weight.parameter].shape, device="meta")
        view = meta.as_strided(weight.shape, weight.stride, weight.offset)
        views.append(WeightView(weight.name, parameters[weight.parameter], view))
    return describe(views, SIZE)


@pytest.mark.parametrize(("fsdp", "tp", "sizes"), [(2, 2, EVEN), (2, 2, UNEVEN), (1, 4, EVEN)], ids=str)
def test_parts_of_real_ranks(fsdp: int, tp: int, sizes: Any) -> None:
    mesh = init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("fsdp", "tp"))
    manifest, weights = plain(sizes)
    named = {one.parameter: one.name for one in manifest.weights}
    whole = parameters_of(manifest, weights)
    parameters = sharded(whole, named, mesh)
    for parameter, tensor in zip(parameters, whole, strict=True):
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.to_local(), tensor[own_box(parameter)])

    source = described(parameters, sizes)
    held: list[Any] = [None] * SIZE
    dist.all_gather_object(held, (source.manifest.digest, [part.clone() for part in source.parts()]))
    assert len({digest for digest, _ in held}) == 1
    parts = {(rank, number): part for rank, (_, own) in enumerate(held) for number, part in enumerate(own)}
    assert all(weight.parameter is not None for weight in source.manifest.weights), "nothing is gathered"
    assert_is_loaded(source.manifest, parts, sizes, Share(size=4, rank=RANK))

    # a checkpoint of these boxes, read in whole and in those of another layout
    saved, stamp = {f"p{number}": parameter for number, parameter in enumerate(parameters)}, Stamp("0" * 12, "xxh3_128")
    file = FOLDER / f"{fsdp}-{tp}-{sizes.V}-{RANK}.safetensors"
    write_parts(file, parts_of(saved), stamp)
    dist.barrier()
    found = open_parts([file.with_name(f"{fsdp}-{tp}-{sizes.V}-{rank}.safetensors") for rank in range(SIZE)], None)
    for number, tensor in enumerate(whole):
        rows = distribute_tensor(tensor, init_device_mesh("cpu", (SIZE,)), [Shard(0)])
        assert torch.equal(found[f"p{number}"].read(), tensor)
        assert torch.equal(found[f"p{number}"].read(own_box(rows)), rows.to_local())
