"""Values are the same there: sent and brought back, NaN and infinity in computations, and in inference mode."""

from __future__ import annotations

import pytest
import torch

from rlcore.conformance.bits import any_bits, same_bits
from rlcore.device import Device

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool],
    ids=str,
)
def test_what_is_sent_there_and_back_has_the_same_bits(device: Device, dtype: torch.dtype) -> None:
    host = any_bits((1 << 16) + 3, dtype)
    there = torch.empty_like(host, device=device.torch_device).copy_(host)
    assert same_bits(there.clone().cpu(), host)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_and_infinity_are_computed_with_as_on_the_cpu(device: Device, dtype: torch.dtype) -> None:
    on_cpu, there = (_of_not_finite(where, dtype) for where in (CPU, device.torch_device))
    for name, expected in on_cpu.items():
        found = there[name]
        assert torch.equal(found.isnan(), expected.isnan()), f"{name}: {found.tolist()}, not {expected.tolist()}"
        assert torch.equal(found.nan_to_num(), expected.nan_to_num()), name


def test_inference_mode_computes_what_it_does_on_the_cpu(device: Device) -> None:
    """Tensors made in it and before it, changed in place, read in it and after it."""
    assert torch.equal(_in_inference_mode(device.torch_device), _in_inference_mode(CPU))


def _of_not_finite(where: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    nan, infinity = float("nan"), float("inf")
    values = torch.tensor([nan, infinity, -infinity, 0.0, -1.0, 2.0], dtype=dtype, device=where)
    found = {
        "x + 1": values + 1,
        "x * 0": values * 0,
        "x - x": values - values,
        "1 / x": 1 / values,
        "sum": values.sum(0, keepdim=True),
        "sum without NaN": values[1:3].sum(0, keepdim=True),
        "x == x": (values == values.clone()).float(),
        "x > 0": (values > 0).float(),
        "isnan": values.isnan().float(),
        "isfinite": values.isfinite().float(),
    }
    return {name: value.cpu() for name, value in found.items()}


def _in_inference_mode(where: torch.device) -> torch.Tensor:
    weight = torch.arange(12.0).view(3, 4).to(where)
    with torch.inference_mode():
        hidden = torch.ones(2, 3, device=where) @ weight
        hidden.add_(1)
        hidden[0].zero_()
        weight.mul_(2)
        found = torch.cat([hidden, weight, torch.tensor([[1.0, 2.0, 3.0, 4.0]]).to(where)])
        assert found.sum().item() > 0
    return torch.cat([found.cpu(), (weight + 1).cpu()])
