"""Autograd and optimizers: a small model learns there what it learns on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from rlcore.conformance.accuracy import inaccuracy
from rlcore.device import Device

STEPS = 4


@pytest.fixture(autouse=True)
def _products_in_float32() -> Iterator[None]:
    """Some environments have products of float32 computed with 10 bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


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


def trained(device: torch.device, kind: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of every token in some steps (steps x tokens), and all parameters after them."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Model()
    model.to(device, dtype)
    foreach, fused = kind == "foreach", kind == "fused"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=foreach, fused=fused)
    tokens = torch.randint(0, 32, (4, 9), generator=generator).to(device)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits, targets = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        losses.append(nn.functional.cross_entropy(logits, targets, reduction="none"))
        losses[-1].mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    parameters = [value.detach().flatten() for value in model.parameters()]
    return torch.stack(losses).detach().cpu(), torch.cat(parameters).cpu()


@pytest.mark.parametrize("kind", ["plain", "foreach", "fused"])
def test_adamw_steps_are_those_of_the_cpu(device: Device, kind: str) -> None:
    cpu = torch.device("cpu")
    exact, on_cpu = trained(cpu, "plain", torch.float64), trained(cpu, "plain")
    try:
        found = trained(device.torch_device, kind)
    except RuntimeError as error:
        if kind == "fused" and "fused" in str(error):
            pytest.skip(f"torch has no fused AdamW for {device.type}: {error}")
        raise
    losses = found[0].mean(1)
    assert losses[-1] < losses[0]
    assert list(map(inaccuracy, found, on_cpu, exact)) == ["", ""]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_the_cpu(device: Device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((8, 16), (16, 4)))

    def gradient(where: torch.device, dtype: torch.dtype) -> torch.Tensor:
        leaf = values.to(where, dtype, copy=True).requires_grad_()
        (torch.tanh(leaf @ weight.to(where, dtype)) ** 2).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    cpu = torch.device("cpu")
    exact, on_cpu = gradient(cpu, torch.float64), gradient(cpu, dtype)
    assert inaccuracy(gradient(device.torch_device, dtype), on_cpu, exact) == ""


def test_a_backward_pass_ends_on_the_stream_where_the_forward_pass_ran(device: Device) -> None:
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
    assert values.grad.min().item() == values.grad.max().item() == 1.5**10  # of 16 bits: nothing was rounded
