"""An implementation of a log-probability operator as two functions, and the autograd function that joins them.

Both take the tensors that may get gradients, then a problem: all other arguments. ``forward`` returns the outputs and
what the backward needs besides them. ``backward`` returns the gradients asked for. ``torch.compile`` sees the two as
opaque operators (``compiled``), eager code as one autograd function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore.errors import UnsupportedError
from rlcore.kernels.row_stats import row_stats_in_order
from rlcore.kernels.softmax_rows import NO_ROW_STATS, Logprobs


class LogprobOutput(NamedTuple):
    """The result of a forward."""

    logprob: Tensor
    """Shape of the targets; 0 in ignored rows."""
    entropy: Tensor | None
    residuals: tuple[Tensor, ...] = ()
    """More numbers of each row for the backward: tensors like ``logprob``, as many as ``num_residuals``."""
    workspace: tuple[Tensor, ...] = ()
    """Tensors that save work and that the first backward may overwrite; a second backward runs without them."""
    row_stats: Mapping[str, Tensor] = NO_ROW_STATS
    """The numbers that ``problem.row_stats`` names, shaped like ``logprob``; 0, or False, in ignored rows."""


class GradOutput(NamedTuple):
    """Gradients of log-probability and entropy; None is 0."""

    logprob: Tensor | None
    entropy: Tensor | None


Gradients = Sequence[Tensor | None]
"""One for each tensor, in its dtype; None where not asked for."""


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """An implementation of ``token_logprob`` or ``linear_logprob``; plugins register such pairs for them."""

    forward: Callable[..., LogprobOutput]
    """``forward(*tensors, problem, for_backward=...)``; only with ``for_backward`` may it return a ``workspace``."""
    backward: Callable[..., Gradients]
    """``backward(*tensors, problem, needs=..., output=..., grad_output=...)``; ``needs`` has a bool for each tensor:
    its gradient is asked for."""
    num_residuals: int
    checks_targets: bool = False
    """True if the forward checks the targets where values are checked on the device (``is_checked_on_device``)."""

    def __call__(self, *arguments: Any) -> Logprobs:
        *tensors, problem = arguments
        for_backward = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        if not for_backward:
            output = self.forward(*tensors, problem, for_backward=False)
            return Logprobs(output.logprob, output.entropy).with_row_stats(output.row_stats)
        logprob, entropy, *numbers = _LogprobFunction.apply(self, problem, *tensors)  # type: ignore[no-untyped-call]
        return Logprobs(logprob, entropy).with_row_stats(dict(zip(problem.row_stats, numbers, strict=True)))


_Backward = Callable[..., tuple[Tensor | None, ...]]


def differentiable_once(backward: _Backward) -> _Backward:
    """Decorate the backward of an autograd function so that a second derivative raises.

    torch's ``once_differentiable`` refuses a second derivative with respect to the inputs of the backward alone, and
    takes the one with respect to what the forward saved to be 0.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = backward(ctx, *grad_output)
        if not torch.is_grad_enabled():  # it is enabled by create_graph=True
            return found
        tracked = [x.requires_grad_() if isinstance(x, Tensor) else None for x in found]
        once: tuple[Tensor | None, ...] = _Once.apply(*tracked)  # type: ignore[no-untyped-call]
        return once

    return checked


class _LogprobFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, implementation: ForwardBackward, problem: Any, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        output = implementation.forward(*tensors, problem, for_backward=True)
        ctx.implementation, ctx.problem, ctx.num_tensors = implementation, problem, len(tensors)
        ctx.is_workspace_used = False
        ctx.set_materialize_grads(False)
        # The workspace too: an activation checkpoint frees only what is saved here.
        ctx.save_for_backward(*tensors, output.logprob, output.entropy, *output.residuals, *output.workspace)
        numbers = row_stats_in_order(output.row_stats, problem.row_stats)
        ctx.mark_non_differentiable(*numbers)
        return output.logprob, output.entropy, *numbers

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g_logprob: Tensor | None, g_entropy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: an activation checkpoint computes them again on the first access
        tensors, (logprob, entropy, *rest) = saved[: ctx.num_tensors], saved[ctx.num_tensors :]
        count = ctx.implementation.num_residuals
        workspace = () if ctx.is_workspace_used else tuple(rest[count:])
        ctx.is_workspace_used = True
        gradients = ctx.implementation.backward(
            *tensors,
            ctx.problem,
            needs=ctx.needs_input_grad[2:],
            output=LogprobOutput(logprob, entropy, tuple(rest[:count]), workspace),
            grad_output=GradOutput(g_logprob, g_entropy),
        )
        return None, None, *gradients


class _Once(torch.autograd.Function):
    """The identity; its backward is the second derivative that ``differentiable_once`` refuses."""

    @staticmethod
    def forward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.view_as(x) for x in gradients)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor | None) -> None:
        raise UnsupportedError(
            "a second derivative of a log-probability or loss operator",
            "its backward is no graph; implementation='reference' has one",
        )
