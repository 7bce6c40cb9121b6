"""An implementation of a log-probability operator as two functions, and the autograd that joins them.

Both take the tensors that may get gradients, then a task: everything else. ``forward`` gives the scores and what
the backward needs besides them; ``backward`` gives the gradients asked for. ``torch.compile`` sees the two as opaque
operators (``compiled``), eager code as one autograd function.

Letters: T rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore.kernels.autograd.once import differentiable_once
from rlcore.kernels.softmax_rows import Logprobs


class Scores(NamedTuple):
    logprob: Tensor
    """Shape of the targets; 0 in ignored rows."""
    entropy: Tensor | None
    residuals: tuple[Tensor, ...] = ()
    """What else the backward needs of each row: tensors like ``logprob``, as many as ``Scorer.num_residuals``."""
    spare: tuple[Tensor, ...] = ()
    """Tensors that the first backward may use up, to save work; a second one does without."""


class Upstream(NamedTuple):
    """Gradients of the scores; None is 0."""

    logprob: Tensor | None
    entropy: Tensor | None


Gradients = Sequence[Tensor | None]
"""One for each tensor, in its dtype; None where not asked for."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """An implementation of ``token_logprob`` or ``linear_logprob``; what plugins register for them."""

    forward: Callable[..., Scores]
    """``forward(*tensors, task, for_backward=...)``; only with ``for_backward`` may it give ``spare``."""
    backward: Callable[..., Gradients]
    """``backward(*tensors, task, needs=..., scores=..., upstream=...)``; ``needs``: which gradients are asked for."""
    num_residuals: int
    checks_targets: bool = False
    """Where values are checked on the device (``operands.is_checked_on_device``) the forward checks the targets."""

    def __call__(self, *arguments: Any) -> Logprobs:
        *tensors, task = arguments
        for_backward = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        if not for_backward:
            scores = self.forward(*tensors, task, for_backward=False)
            return Logprobs(scores.logprob, scores.entropy)
        return Logprobs(*_Scored.apply(self, task, *tensors))  # type: ignore[no-untyped-call]


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scorer: Scorer, task: Any, *tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        scores = scorer.forward(*tensors, task, for_backward=True)
        ctx.scorer, ctx.task, ctx.num_tensors, ctx.is_spare_used = scorer, task, len(tensors), False
        ctx.set_materialize_grads(False)
        # the spare too: an activation checkpoint lets go of nothing else
        ctx.save_for_backward(*tensors, scores.logprob, scores.entropy, *scores.residuals, *scores.spare)
        return scores.logprob, scores.entropy

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g_logprob: Tensor | None, g_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: an activation checkpoint computes them again on the first look
        tensors, (logprob, entropy, *rest) = saved[: ctx.num_tensors], saved[ctx.num_tensors :]
        residuals, spare = tuple(rest[: ctx.scorer.num_residuals]), tuple(rest[ctx.scorer.num_residuals :])
        scores = Scores(logprob, entropy, residuals, () if ctx.is_spare_used else spare)
        ctx.is_spare_used = True
        needs, upstream = ctx.needs_input_grad[2:], Upstream(g_logprob, g_entropy)
        return None, None, *ctx.scorer.backward(*tensors, ctx.task, needs=needs, scores=scores, upstream=upstream)
