"""Gradients above ``max_grad_norm`` are scaled down to it, and others are left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.engines.executors.clipping import clip_and_step
from tests.accuracy import assert_same_bits, assert_within_rounding

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "as torch does": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}
"""The two ways to clip: a pass over the gradients, and the optimizer's own as it reads them."""


def stepped(make: Callable[..., Any], max_norm: float | None) -> tuple[Tensor, Tensor]:
    """Return the change of 64 zeros by a step, and their gradient, whose norm is about 8."""
    parameter = torch.nn.Parameter(torch.zeros(64))
    gradient = torch.randn(64, generator=torch.Generator().manual_seed(0))
    parameter.grad = gradient.clone()
    clip_and_step([make([parameter])], [parameter.grad], parameter.grad.norm(), max_norm)
    return parameter.detach(), gradient


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_gradients_below_the_limit_keep_every_bit(make: Callable[..., Any]) -> None:
    """A division by 1 changes nothing."""
    unlimited, _ = stepped(make, None)
    assert unlimited.any()
    for max_norm in (20.0, 1e6):
        assert_same_bits(stepped(make, max_norm)[0], unlimited, f"max_grad_norm={max_norm:g}")


def test_gradients_above_the_limit_have_it_as_their_norm() -> None:
    change, gradient = stepped(OPTIMIZERS["as torch does"], 0.5)
    norm = float(gradient.double().norm())
    assert_within_rounding(change, -gradient.double() * 0.5 / (norm + 1e-6), terms=64 + 4)
