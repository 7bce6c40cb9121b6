"""A module is looked through in every round: what it has now is sent, whatever was put in its place since the last."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from rlcore.engines.weight_sync.module_source import ModuleSourceTensors
from rlcore.tensor_data import dtype_name


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.head = nn.Linear(2, 4, bias=False)
        self.register_buffer("balance", torch.zeros(3))
        self.register_buffer("later", None)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


def replace_parameter(model: Model) -> None:
    model.layers[1].bias = nn.Parameter(torch.ones(2))


def replace_layer(model: Model) -> None:
    model.layers[0] = nn.Linear(2, 2)


def add_adapter(model: Model) -> None:
    model.layers[1].register_module("adapter", nn.Linear(2, 1))


def remove_bias(model: Model) -> None:
    model.layers[0].bias = None  # type: ignore[assignment]


def swap_layers(model: Model) -> None:
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def tie(model: Model) -> None:
    model.head.weight = model.embedding.weight


def move_storage(model: Model) -> None:
    model.head.weight.data = model.head.weight.data.clone()


def move_storage_in_place(model: Model) -> None:
    model.head.weight.untyped_storage().resize_(1 << 16)


def change_dtype(model: Model) -> None:
    model.bfloat16()


def read_as_another_dtype(model: Model) -> None:
    model.head.weight.data = model.head.weight.data.view(torch.int32).view(torch.float16)


def change_shape(model: Model) -> None:
    model.head.weight.data = torch.ones(5, 2)


def change_shape_of_the_same_memory(model: Model) -> None:
    model.head.weight.data = model.head.weight.data.view(2, 4)


def replace_buffer(model: Model) -> None:
    model.balance = model.balance + 1


def set_buffer(model: Model) -> None:
    model.later = torch.ones(2)


def nothing(model: Model) -> None:
    pass


@pytest.mark.parametrize(
    "change",
    [
        replace_parameter,
        replace_layer,
        add_adapter,
        remove_bias,
        swap_layers,
        tie,
        move_storage,
        move_storage_in_place,
        change_dtype,
        read_as_another_dtype,
        change_shape,
        change_shape_of_the_same_memory,
        replace_buffer,
        set_buffer,
        nothing,
    ],
)
def test_the_parts_are_those_of_the_module_as_it_is(change: Callable[[Model], None]) -> None:
    model = Model()
    source = ModuleSourceTensors(model, 1)
    before = source.parts()
    assert source.parts() is before
    change(model)
    parts = source.parts()
    held = dict(model.named_parameters()) | {name: one for name, one in model.named_buffers() if name != "scratch"}
    assert [part.data_ptr() for part in parts] == [one.data_ptr() for one in held.values()]
    assert [weight.name for weight in source.manifest.weights] == list(held)
    described = [(one.dtype, one.shape) for one in source.manifest.parameters]
    assert described == [(dtype_name(one.dtype), one.shape) for one in held.values()]


def test_what_is_no_longer_contiguous_is_no_part() -> None:
    model = nn.Linear(2, 2, bias=False)
    source = ModuleSourceTensors(model, 1)
    assert len(source.parts()) == 1
    model.weight.data = model.weight.data.t()
    assert source.parts() == [] and source.manifest.weights[0].parameter is None
    assert source.compute([0])[0].equal(model.weight)


def test_a_write_to_a_persistent_buffer_is_a_change() -> None:
    model = Model()
    source = ModuleSourceTensors(model, 1)
    source.parts()
    before = source.changes()
    model.scratch.add_(1)
    assert source.changes() == before
    model.balance.add_(1)
    assert source.changes() != before


def test_what_is_gathered_is_freed_before_any_parameter_is_looked_at() -> None:
    """Also where a layer is found by another way than through the module that has gathered it."""
    root, holder, layer = nn.Module(), nn.Module(), nn.Linear(2, 2, bias=False)
    root.first, root.last, holder.inner = layer, holder, layer
    gathered, stored = layer.weight, [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]

    class Gathering(FSDPModule, nn.Module):  # type: ignore[misc]
        def reshard(self) -> None:
            layer.weight = now

    holder.__class__ = Gathering
    source = ModuleSourceTensors(root, 1)
    for now in stored:
        layer.weight = gathered
        (part,) = source.parts()
        assert part.data_ptr() == now.data_ptr()


def test_a_write_through_a_sharded_parameter_is_a_change() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Model()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        source = ModuleSourceTensors(model, 1)
        source.parts()
        before = source.changes()
        assert source.changes() == before
        with torch.no_grad():
            model.head.weight.add_(1)
        assert source.changes() != before
    finally:
        dist.destroy_process_group()
