"""A loss of whole sequences under sequence parallelism, where the rows of a sequence are on several ranks.

Log-probabilities are vectors of one number a token: every rank gets those of all ranks, computes the loss of the whole
micro-batch, and takes the gradient of its own rows.

Letters: R scored rows of the micro-batch, S of them this rank's, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlcore.engines.executors.train_options import LossOptions
from rlcore.engines.fsdp2.micro_batch import MicroBatch
from rlcore.engines.rank_batch import WEIGHT
from rlcore.kernels.linear.logprob import linear_logprob
from rlcore.kernels.losses.interface import LossOutput
from rlcore.kernels.token.loss import token_loss
from rlcore.nn import OutputHead
from rlcore.packed.sequence_parallel import SequenceGroup, joined_rows


def loss_of_shared_sequences(
    hidden_SH: Tensor,
    head: OutputHead,
    micro_batch: MicroBatch,
    loss_fn: Callable[..., Any],
    *,
    options: LossOptions,
    group: SequenceGroup,
) -> tuple[LossOutput, Tensor]:
    """Return the loss and the sum of token weights. The first rank has their values, the others 0, so that they add up.

    The gradient of the loss is that of this rank's rows.
    """
    found = linear_logprob(
        hidden_SH,
        head.weight,
        micro_batch.targets_S,
        bias=head.bias,
        temperature=options.temperature,
        softcap=head.softcap,
        logit_scale=head.logit_scale,
        with_entropy=options.with_entropy,
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
        return LossOutput(loss, stats), weight_R.sum()
    stats = {name: torch.zeros_like(value) if name.endswith("_sum") else value for name, value in stats.items()}
    return LossOutput(loss - loss.detach(), stats), weight_R.new_zeros(())
