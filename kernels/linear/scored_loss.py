"""A loss in two passes: log-probabilities of all rows first, and their gradients once the whole loss is known.

For a loss of sequences of which one is longer than a chunk. ``linear_logprob`` of the same implementation makes both
passes within the memory budget; where it keeps nothing in between, the logits are made twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rlcore.kernels.autograd.loss_in_chunks import ChunkWork, KnownGradients, LossOutput, LossTask, loss_in_chunks
from rlcore.kernels.autograd.scorer import Gradients, Scorer, Scores, Upstream
from rlcore.kernels.linear.head import Needs
from rlcore.kernels.linear.problem import HeadInputs, HeadTask
from rlcore.kernels.softmax_rows import wide_dtype


class ScoredWork(ChunkWork):
    """One chunk of all rows. What its scorer keeps is used up by the first backward, the upstream scalar included.

    What a second backward needs it makes again.
    """

    def __init__(self, scorer: Scorer, inputs: HeadInputs, task: HeadTask) -> None:
        self.dtype = wide_dtype(inputs.weight.dtype)
        self._scorer, self._inputs, self._task = scorer, inputs, task
        self._needs = Needs.of(*inputs)
        self._scores: Scores | None = None
        self._upstream: Upstream | None = None

    def statistics(self, chunk: slice) -> tuple[Tensor, Tensor | None]:
        self._scores = self._scorer.forward(*self._inputs, self._task, for_backward=any(self._needs))
        return self._scores.logprob, self._scores.entropy

    def add_gradients(self, g_logprob_T: Tensor | None, g_entropy_T: Tensor | None) -> None:
        self._upstream = Upstream(g_logprob_T, g_entropy_T)

    def gradients(self, inputs: HeadInputs) -> KnownGradients:
        scorer, scores, upstream = self._scorer, self._scores, self._upstream
        needs, task = self._needs, self._task
        assert scores is not None and upstream is not None
        saved, scores, is_spare_used = (*inputs, *scores.spare), scores._replace(spare=()), False

        def times(tensors: Sequence[Any], factor: Tensor) -> Gradients:
            nonlocal is_spare_used
            hidden_TH, weight_VH, bias_V, *spare = tensors
            last, is_spare_used = scores._replace(spare=() if is_spare_used else tuple(spare)), True
            whole = Upstream(*(None if g_T is None else g_T * factor for g_T in upstream))
            return scorer.backward(hidden_TH, weight_VH, bias_V, task, needs=needs, scores=last, upstream=whole)

        return KnownGradients(saved, times)


def scored_loss(scorer: Scorer, inputs: HeadInputs, task: HeadTask, loss: LossTask) -> LossOutput:
    return loss_in_chunks(ScoredWork(scorer, inputs, task), inputs, loss, max(len(inputs.hidden), 1))
