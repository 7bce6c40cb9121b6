"""Autograd and optimizers: a small model learns there what it learns on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

STEPS = 4


class Model(nn.Module):
    """Embedding, attention, normalisation and a head: what a language model is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.qkv = nn.Linear(
            16, 48, bias=False
        )  # attention takes no notice of the bias of keys: no gradient to compare
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens_NL: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens_NL)
        q, k, v = self.qkv(hidden).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(self.norm(hidden + nn.functional.gelu(mixed.transpose(1, 2).flatten(-2))))  # type: ignore[no-any-return]


def trained(device: torch.device, kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of a few steps, and the parameters after them."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Model()
    model.to(device)
    foreach, fused = kind == "foreach", kind == "fused"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=foreach, fused=fused)
    tokens = torch.randint(0, 32, (4, 9), generator=generator).to(device)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach().cpu() for name, value in model.named_parameters()}


@pytest.mark.parametrize("kind", ["plain", "foreach", "fused"])
def test_adamw_steps_are_those_of_the_cpu(device: Any, kind: str) -> None:
    expected_losses, expected = trained(torch.device("cpu"), "plain")
    try:
        losses, parameters = trained(device.torch_device, kind)
    except RuntimeError as error:
        if kind == "fused" and "fused" in str(error):
            pytest.skip(f"torch has no fused AdamW for {device.type}: {error}")
        raise
    assert losses == pytest.approx(expected_losses, rel=1e-3)
    assert losses[-1] < losses[0]
    for name, value in expected.items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_the_cpu(device: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    host = torch.randn(8, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(16, 4, generator=generator).to(dtype)
    there = host.detach().to(device.torch_device).requires_grad_()
    (torch.tanh(host @ weight).float() ** 2).sum().backward()
    (torch.tanh(there @ weight.to(device.torch_device)).float() ** 2).sum().backward()
    assert there.grad is not None and host.grad is not None
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(there.grad.cpu(), host.grad, rtol=tolerance, atol=tolerance)


def test_a_backward_pass_ends_on_the_stream_where_the_forward_pass_ran(device: Any) -> None:
    stream = device.streams.new()
    values = torch.ones(1 << 20, device=device.torch_device, requires_grad=True)
    device.synchronize()
    with device.streams.use(stream):
        loss = values
        for _ in range(10):
            loss = loss * 1.5
        loss.sum().backward()
    stream.synchronize()
    assert values.grad is not None
    assert values.grad.min().item() == values.grad.max().item() == pytest.approx(1.5**10)
