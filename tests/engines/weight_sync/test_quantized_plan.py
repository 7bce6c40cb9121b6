"""Weights that an engine keeps in float8: the plan quantises them on their way, as the engine's own loader would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlcore.engines.weight_sync.endpoint import endpoint_info
from rlcore.engines.weight_sync.planning.execution import PlanExecution, source_name
from rlcore.engines.weight_sync.planning.manifest import describe
from rlcore.engines.weight_sync.planning.planner import Planner
from rlcore.engines.weight_sync.planning.quantized import row_segments
from rlcore.engines.weight_sync.planning.strided_copy import Copy
from rlcore.engines.weight_sync.target import LoadWeights, Target, Weights
from rlcore.errors import InvalidInputError
from rlcore.kernels.strided_copy.quantized import (
    QuantizedMatrices,
    RowSegment,
    quantized_blocks,
    quantized_whole,
)
from rlcore.registry import get_device
from rlcore.weights.view import WeightView

HIDDEN, EXPERTS = 128, 3
ROWS = {"q": 128, "k": 64, "v": 64}
DTYPE = torch.bfloat16


class Fused(nn.Module):
    """An engine's model before it quantises: query, key and value in one; gate and up of each expert in one."""

    def __init__(self, device: str) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": DTYPE}
        self.qkv = nn.Parameter(torch.zeros(sum(ROWS.values()), HIDDEN, **options))
        self.gate_up = nn.Parameter(torch.zeros(EXPERTS, 128, HIDDEN, **options))
        self.norm = nn.Parameter(torch.zeros(HIDDEN, **options))

    @torch.no_grad()
    def load_weights(self, weights: Weights) -> None:
        places: dict[str, Tensor] = {"norm": self.norm}
        at = 0
        for name, rows in ROWS.items():
            places[name] = self.qkv[at : at + rows]
            at += rows
        for expert in range(EXPERTS):
            places |= {f"gate.{expert}": self.gate_up[expert, :64], f"up.{expert}": self.gate_up[expert, 64:]}
        for name, weight in weights:
            places[name].copy_(weight)


class Float8Target(Target):
    """It keeps ``qkv`` turned, as kernels want it, and ``gate_up`` as it is."""

    def __init__(self, *, is_blockwise: bool, shuffles: str = "") -> None:
        self.device = get_device("cpu")
        self._quantize = quantized_blocks if is_blockwise else quantized_whole
        self._is_blockwise, self._shuffles = is_blockwise, shuffles
        qkv, gate_up = torch.zeros(1, 256, HIDDEN, dtype=DTYPE), torch.zeros(EXPERTS, 128, HIDDEN, dtype=DTYPE)
        (self.qkv, self.qkv_scale), (self.gate_up, self.gate_up_scale) = map(self._quantize, (qkv, gate_up))
        self.norm = torch.zeros(HIDDEN, dtype=DTYPE)

    def meta_model(self) -> tuple[nn.Module, LoadWeights]:
        model = Fused("meta")
        return model, model.load_weights

    def tensors(self) -> dict[str, Tensor]:
        own = {"qkv": self.qkv[0].t(), "qkv_scale": self.qkv_scale}
        return own | {"gate_up": self.gate_up, "gate_up_scale": self.gate_up_scale, "norm": self.norm}

    def quantized(self) -> Mapping[str, QuantizedMatrices]:
        sizes = EXPERTS, 128, HIDDEN, self._is_blockwise
        return {
            "qkv": QuantizedMatrices(self.qkv[0].t(), self.qkv_scale, 1, 256, HIDDEN, self._is_blockwise),
            "gate_up": QuantizedMatrices(self.gate_up, self.gate_up_scale, *sizes),
        }

    def reload(self, weights: Weights) -> None:
        model = Fused("cpu")
        model.load_weights(weights)
        for name, values in (("qkv", model.qkv[None]), ("gate_up", model.gate_up)):
            quantized, scale = self._quantize(values.detach())
            shuffles = self._shuffles if name == "gate_up" else ""
            getattr(self, name).copy_(quantized.flip(1) if shuffles == "rows" else quantized)
            getattr(self, f"{name}_scale").copy_(scale.flip(0) if shuffles == "scales" else scale)
        self.norm.copy_(model.norm.detach())

    def committed(self, version: int) -> None: ...


def trainer(dtype: torch.dtype = DTYPE) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Parameters, and the weights that are views of each: the experts are fused, the other way about."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    fused = made(EXPERTS, 128, HIDDEN)
    gates = {f"gate.{expert}": fused[expert, :64] for expert in range(EXPERTS)}
    ups = {f"up.{expert}": fused[expert, 64:] for expert in range(EXPERTS)}
    wide = made(64, 2 * HIDDEN)
    single = {name: made(*shape) for name, shape in {"q": (128, HIDDEN), "v": (64, HIDDEN), "norm": (HIDDEN,)}.items()}
    parameters = {name: (tensor, {name: tensor}) for name, tensor in single.items()}
    return parameters | {"fused": (fused, gates | ups), "k": (wide, {"k": wide[:, HIDDEN:]})}


def planned(target: Target, dtype: torch.dtype = DTYPE, unreached: str = "") -> tuple[Planner, dict[str, Tensor], Any]:
    """A planner, the senders' tensors by the names that executions use, and all weights."""
    views = [
        WeightView(name, parameter, view)
        for parameter, weights in trainer(dtype).values()
        for name, view in weights.items()
    ]
    described = describe(views, 1)
    info = endpoint_info(target.device)
    planner = Planner(target, described.manifest, [info], [unreached], receiver=info, number=0)
    sources = {
        source_name(0, number): parameter.detach().view(-1)
        for number, parameter in enumerate(described.local_parameters())
    }
    return planner, sources, {view.name: view.view for view in views}


def run(planner: Planner, target: Target, sources: dict[str, Tensor]) -> None:
    execution = executed(planner, target)
    execution.whole().run(sources, target.tensors())
    execution.quantizing().run(sources, target.quantized())


def executed(planner: Planner, target: Target) -> PlanExecution:
    return PlanExecution(
        planner.plan.digest,
        planner.pieces(),
        target.tensors,
        read_bytes=planner.plan.needed_bytes,
        is_scratch=False,
        quantized=planner.quantized,
    )


def bits(target: Target) -> dict[str, Tensor]:
    return {name: tensor.contiguous().view(torch.uint8).clone() for name, tensor in target.tensors().items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("is_blockwise", [True, False], ids=["blocks", "whole"])
def test_the_plan_leaves_what_the_engines_loader_would(is_blockwise: bool, dtype: torch.dtype) -> None:
    target = Float8Target(is_blockwise=is_blockwise)
    planner, sources, weights = planned(target, dtype)
    assert planner.quantized == {"qkv", "gate_up"}
    assert (planner.fallback, planner.is_tested) == ([], False)
    planner.run_self_test()
    assert (planner.fallback, planner.is_tested) == ([], True), "the self-test finds it right"
    assert "qkv is quantised" in planner.unreadable or "gate_up is quantised" in planner.unreadable
    run(planner, target, sources)
    found = bits(target)
    target.reload((name, weight.detach()) for name, weight in weights.items())
    assert target.gate_up_scale.abs().sum() > 0
    for name, expected in bits(target).items():
        assert torch.equal(found[name], expected), name


def test_copies_that_are_kept_follow_the_tensors_that_move() -> None:
    target = Float8Target(is_blockwise=True)
    planner, sources, _ = planned(target)
    copies = executed(planner, target).quantizing()
    copies.run(sources, target.quantized())
    before = bits(target)
    for tensor in sources.values():
        tensor.neg_()
    copies.run(sources, target.quantized())
    assert not torch.equal(bits(target)["qkv"], before["qkv"]), "the same tensors, with other values"
    copies.run({name: -tensor for name, tensor in sources.items()}, target.quantized())
    assert torch.equal(bits(target)["qkv"], before["qkv"]), "other tensors of the sender"
    target.gate_up, target.gate_up_scale = torch.zeros_like(target.gate_up), torch.zeros_like(target.gate_up_scale)
    copies.run({name: -tensor for name, tensor in sources.items()}, target.quantized())
    for name in ("qkv", "qkv_scale", "gate_up", "gate_up_scale"):
        assert torch.equal(bits(target)[name], before[name]), f"{name}, where the engine has others"


@pytest.mark.parametrize("shuffles", ["rows", "scales"])
def test_what_a_kernel_wants_in_another_order_is_left_to_the_loader(shuffles: str) -> None:
    """Scales of experts that are exchanged show only where the experts have other maxima."""
    target = Float8Target(is_blockwise=True, shuffles=shuffles)
    planner, _, _ = planned(target)
    planner.run_self_test()
    assert planner.quantized == {"qkv"}
    assert sorted(planner.fallback)[:2] == ["gate.0", "gate.1"]


def test_without_the_trainers_memory_the_loader_is_given_all() -> None:
    planner, _, _ = planned(Float8Target(is_blockwise=False), unreached="it is on another machine")
    assert planner.quantized == frozenset()
    assert {"q", "k", "v", "gate.0", "up.2"} <= set(planner.fallback)
    assert "norm" in planner.destination_names or "norm" in planner.fallback


@pytest.mark.parametrize(
    ("copy", "segments"),
    [
        (Copy((32,), 5, (1,), 16, (1,)), [RowSegment(2, 4, 0, 5, 8)]),
        (Copy((3, 8), 5, (20, 1), 8, (8, 1)), [RowSegment(1, 3, 0, 5, 20)]),
        (Copy((2, 3, 8), 0, (100, 20, 1), 0, (64, 8, 1)), [RowSegment(0, 3, 0, 0, 20), RowSegment(8, 3, 0, 100, 20)]),
        (Copy((2, 16), 0, (50, 1), 0, (32, 1)), [RowSegment(0, 2, 0, 0, 8), RowSegment(4, 2, 0, 50, 8)]),
    ],
)
def test_rows_of_a_copy(copy: Copy, segments: list[RowSegment]) -> None:
    assert row_segments(0, copy, 8) == segments


@pytest.mark.parametrize(
    "copy",
    [
        Copy((4,), 0, (1,), 0, (1,)),
        Copy((8,), 0, (1,), 4, (1,)),
        Copy((8, 8), 0, (1, 8), 0, (8, 1)),
        Copy((2, 4), 0, (4, 1), 0, (8, 1)),
    ],
)
def test_parts_of_rows_are_none(copy: Copy) -> None:
    with pytest.raises(InvalidInputError, match="has parts of rows"):
        row_segments(0, copy, 8)
