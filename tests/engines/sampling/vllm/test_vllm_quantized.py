"""Some of vLLM's weights were quantised while they were loaded: layers as vLLM 0.26 makes them, without vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from rlcore.engines.sampling.vllm.quantized import quantized_matrices

FLOAT8 = torch.float8_e4m3fn


def method(name: str) -> Any:
    return type(name, (), {})()


def parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def linear(quantisation: str, weight: Tensor, sizes: tuple[int, int] = (256, 128), **scales: Tensor) -> nn.Module:
    layer: Any = nn.Module()
    layer.quant_method = method(quantisation)
    layer.output_size_per_partition, layer.input_size_per_partition = sizes
    layer.weight_block_size = [128, 128] if "Block" in quantisation else None
    layer.weight = parameter(weight)
    for name, scale in scales.items():
        setattr(layer, name, parameter(scale))
    return layer


def float8(*shape: int) -> Tensor:
    return torch.zeros(shape).to(FLOAT8)


def found(layer: nn.Module) -> dict[str, Any]:
    model = nn.Module()
    model.proj = layer
    return quantized_matrices(model, torch.bfloat16)


def test_a_linear_layer_in_blocks_and_one_that_a_kernel_wants_turned() -> None:
    layer = linear("Fp8PerBlockOnlineLinearMethod", float8(256, 128), weight_scale_inv=torch.ones(2, 1))
    (name, blocks), *others = found(layer).items()
    assert (name, others) == ("proj.weight", [])
    assert (blocks.count, blocks.rows, blocks.columns, blocks.is_blockwise) == (1, 256, 128, True)
    assert blocks.weight.data_ptr() == layer.weight.data_ptr()
    turned = linear("Fp8PerTensorOnlineLinearMethod", float8(256, 128).t(), weight_scale=torch.ones(1))
    whole = found(turned)["proj.weight"]
    assert (whole.count, whole.rows, whole.columns, whole.is_blockwise) == (1, 256, 128, False)
    assert whole.dtype == torch.bfloat16


def test_a_square_matrix_that_a_kernel_wants_turned() -> None:
    weight = float8(256, 256)
    layer = linear("Fp8PerTensorOnlineLinearMethod", weight.t(), (256, 256), weight_scale=torch.ones(1))
    assert found(layer)["proj.weight"].weight.data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("is_off", [True, False])
def test_blocks_are_divided_as_vllms_function_runs(is_off: bool) -> None:
    layer = linear("Fp8PerBlockOnlineLinearMethod", float8(256, 128), weight_scale_inv=torch.ones(2, 1))
    with torch._dynamo.config.patch(disable=is_off):
        assert found(layer)["proj.weight"].divides_as_ieee is is_off


def test_experts_have_a_scale_each() -> None:
    layer: Any = nn.Module()
    layer.quant_method = method("Fp8PerTensorOnlineMoEMethod")
    for name, shape in (("w13", (4, 256, 128)), ("w2", (4, 128, 128))):
        setattr(layer, f"{name}_weight", parameter(float8(*shape)))
        setattr(layer, f"{name}_weight_scale", parameter(torch.ones(4)))
    matrices = found(layer)
    assert matrices.keys() == {"proj.w13_weight", "proj.w2_weight"}
    assert (matrices["proj.w13_weight"].count, matrices["proj.w13_weight"].rows) == (4, 256)


@pytest.mark.parametrize(
    "layer",
    [
        linear("Fp8LinearMethod", float8(256, 128), weight_scale=torch.ones(1)),
        linear("Fp8PtpcOnlineLinearMethod", float8(256, 128), weight_scale=torch.ones(256, 1)),
        linear("UnquantizedLinearMethod", torch.zeros(256, 128)),
        linear("Fp8PerTensorOnlineLinearMethod", float8(256, 144)[:, :128], weight_scale=torch.ones(1)),
        linear("Fp8PerTensorOnlineLinearMethod", float8(272, 128), weight_scale=torch.ones(1)),
        linear("Fp8PerBlockOnlineLinearMethod", float8(256, 128), weight_scale_inv=torch.ones(1, 4)[:, ::2].t()),
        linear("Fp8PerBlockOnlineLinearMethod", float8(256, 128), weight_scale_inv=torch.ones(2, 2)),
        linear("Fp8PerTensorOnlineLinearMethod", float8(256, 128)),
    ],
    ids=lambda layer: type(layer.quant_method).__name__,
)
def test_others_are_left_to_vllms_loader(layer: nn.Module) -> None:
    assert found(layer) == {}
