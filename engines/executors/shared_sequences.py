"""A loss of whole sequences under sequence parallelism, where the rows of a sequence are on several ranks.

Log-probabilities are vectors of one number a token: every rank gets those of all ranks, computes the loss of the whole
micro-batch, and takes the gradient of its own rows.

Letters: R scored rows of the micro-batch, S of them this rank's, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlcore.engines.executors.micro_batch import MicroBatch
from rlcore.engines.executors.train_options import LossOptions
from rlcore.engines.rank_batch import WEIGHT
from rlcore.kernels.linear.logprob import linear_logprob
from rlcore.kernels.losses.interface import LossFn
from rlcore.kernels.token.loss import token_loss
from rlcore.nn import OutputHead
from rlcore.packed.sequence_parallel import SequenceGroup, joined_rows


def loss_of_shared_sequences(
    hidden_SH: Tensor,
    head: OutputHead,
    micro_batch: MicroBatch,
    loss_fn: LossFn,
    *,
    options: LossOptions,
    group: SequenceGroup,
) -> tuple[Tensor, tuple[Mapping[str, Tensor], Tensor]]:
    """Return the loss, its statistics and the sum of token weights.

    The first rank has their values, the others 0, so that they add up. The gradient of the loss is that of this rank's
    rows.
    """
    found = linear_logprob(
        hidden_SH,
        targets=micro_batch.targets_S,
        temperature=options.temperature,
        with_entropy=options.with_entropy,
        **head._asdict(),
    )
    per_token = dict(micro_batch.per_token)
    weight_R = per_token.pop(WEIGHT)

    def joined(own_S: Tensor) -> Tensor:
        return joined_rows(own_S, micro_batch.own, len(weight_R), group)

    loss, stats = token_loss(
        joined(found.logprob),
        loss_fn,
        per_token=per_token,
        token_weight=weight_R,
        entropy=None if found.entropy is None else joined(found.entropy),
        cu_seqlens=micro_batch.cu_rows,
    )
    if group.rank == 0:
        return loss, (stats, weight_R.sum())
    stats = {name: torch.zeros_like(value) if name.endswith("_sum") else value for name, value in stats.items()}
    return loss - loss.detach(), (stats, weight_R.new_zeros(()))
