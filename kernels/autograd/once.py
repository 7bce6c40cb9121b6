"""A backward without a second derivative, that says so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlcore.errors import UnsupportedError

Backward = Callable[..., tuple[Tensor | None, ...]]


def differentiable_once(backward: Backward) -> Backward:
    """For the backward of an autograd function. torch's ``once_differentiable`` refuses a second derivative with
    respect to what the backward is given, and takes that with respect to what the forward saved to be 0."""

    @functools.wraps(backward)
    def checked(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = backward(ctx, *upstream)
        if not torch.is_grad_enabled():  # of create_graph
            return found
        tracked = [x.requires_grad_() if isinstance(x, Tensor) else None for x in found]
        once: tuple[Tensor | None, ...] = _Once.apply(*tracked)  # type: ignore[no-untyped-call]
        return once

    return checked


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.view_as(x) for x in gradients)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> None:
        raise UnsupportedError(
            "a second derivative of a log-probability or loss operator",
            "its backward is no graph; implementation='reference' has one",
        )
