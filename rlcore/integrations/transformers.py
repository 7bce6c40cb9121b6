"""transformers' Trainer on rlcore: losses without logits, and the optimizer's states away while the model is evaluated.

    trainer = Trainer(train_without_logits(model), args, callbacks=[OffloadOptimizer()], ...)

``Trainer.compute_loss_func`` is given logits that are made already, so the loss is computed in the model's forward:
there it is inside DDP's and FSDP's, too.

Letters: B sequences, L tokens, H a hidden size, T scored tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import TrainerCallback
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

import rlcore
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.integrations.causal_head import IGNORED, CausalHead, replace_forward, without_adapters

Loss = Callable[..., Tensor]
"""A function (head, hidden_BLH, labels_BL, *, ...) -> loss; its keyword arguments are columns of the batch."""


_COUNT = "num_items_in_batch"
"""Trainer's argument: the labels that count in all the batches whose gradients are added up."""


def next_token_loss(
    head: CausalHead, hidden_BLH: Tensor, labels_BL: Tensor, *, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Return the cross entropy of each next token, as transformers' causal models do.

    Args:
        head: of the model that gave ``hidden_BLH``.
        labels_BL: the tokens themselves, not shifted; ``-100`` does not count.
        num_items_in_batch: divides the sum, as Trainer wants it; without it, the number of tokens that count does.
    """
    logprob_BL, scored_BL = _scored(head, hidden_BLH, labels_BL)
    return -logprob_BL.sum() / (scored_BL.sum() if num_items_in_batch is None else num_items_in_batch)


def dpo_loss(
    head: CausalHead,
    hidden_BLH: Tensor,
    labels_BL: Tensor,
    *,
    ref_logprobs: Tensor,
    beta: float = 0.1,
) -> Tensor:
    """Return direct preference optimization's loss: the mean of -log sigmoid(beta * margin) over the pairs.

    Args:
        labels_BL: chosen completions in the first half of the rows, the rejected ones in the same order in the second.
        ref_logprobs: [B], ``sequence_logprobs`` of the reference model.
    """
    count = labels_BL.shape[0]
    if count % 2 or ref_logprobs.shape != (count,):
        raise InvalidInputError(
            "dpo_loss takes chosen completions and as many rejected ones after them, with one ref_logprobs each; got "
            f"{count} rows and ref_logprobs of shape {tuple(ref_logprobs.shape)}"
        )
    gain_B = sequence_logprobs(head, hidden_BLH, labels_BL) - ref_logprobs
    chosen, rejected = gain_B.chunk(2)
    return -functional.logsigmoid(beta * (chosen - rejected)).mean()


def distillation_loss(
    head: CausalHead,
    hidden_BLH: Tensor,
    labels_BL: Tensor,
    *,
    teacher_logprobs: Tensor,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Return the mean of (log student - log teacher)^2 / 2 over tokens that the student has sampled.

    Its gradient is, in expectation over these tokens, that of the divergence KL(student || teacher). A divergence over
    the whole vocabulary needs the logits of both.

    Args:
        teacher_logprobs: [B, L], of each label by the teacher; what stands at labels of ``-100`` is not read.
        num_items_in_batch: as in ``next_token_loss``.
    """
    if teacher_logprobs.shape != labels_BL.shape:
        raise InvalidInputError(
            f"teacher_logprobs has one number for each label, {tuple(labels_BL.shape)}; got "
            f"{tuple(teacher_logprobs.shape)}"
        )
    logprob_BL, scored_BL = _scored(head, hidden_BLH, labels_BL)
    gap_BL = torch.where(scored_BL, logprob_BL - teacher_logprobs[:, 1:], 0.0)
    return gap_BL.square().sum() / 2 / (scored_BL.sum() if num_items_in_batch is None else num_items_in_batch)


def sequence_logprobs(head: CausalHead, hidden_BLH: Tensor, labels_BL: Tensor) -> Tensor:
    """Return [B], the log-probability of the labels of each row, which are not shifted."""
    return _scored(head, hidden_BLH, labels_BL)[0].sum(-1)


def train_without_logits(model: Any, loss: Loss = next_token_loss) -> Any:
    """Let ``model(**inputs)`` compute ``loss`` of hidden states where it trains and gets labels; return the model.

    In evaluation, without labels and in ``generate()`` the model is as before. Where it trains, ``shift_labels`` in the
    batch are an UnsupportedError.

    Args:
        model: a causal language model of transformers, not sharded yet; PEFT may wrap it.
        loss: see ``Loss``. What its keyword arguments name is taken out of what the model gets; set
            ``remove_unused_columns=False`` where the batch has such columns.

    Raises:
        UnsupportedError: the logits are no function that ``linear_logprob`` computes, the model adds a loss of its
            experts' balance, or its own loss is another one than the next token's; the model is as before.
    """
    causal = without_adapters(model)
    if getattr(causal.config.get_text_config(), "output_router_logits", False):
        raise UnsupportedError(
            f"train_without_logits() of this {type(causal).__name__}",
            "it adds a loss of its experts' balance; set output_router_logits=False in its config to leave that out",
        )
    if loss is next_token_loss and causal.loss_function is not ForCausalLMLoss:
        raise UnsupportedError(
            f"train_without_logits() of this {type(causal).__name__}", "its own loss is not that of the next token"
        )
    head = CausalHead(causal)
    taken = _keywords(loss)

    def forward(
        model: Any, original: Callable[..., Any], *args: Any, labels: Tensor | None = None, **options: Any
    ) -> Any:
        if labels is None or not model.training:
            return original(*args, **options) if labels is None else original(*args, labels=labels, **options)
        if options.get("shift_labels") is not None:
            raise UnsupportedError(
                "train_without_logits() of a batch with shift_labels, as context parallelism makes it,",
                "the loss shifts labels within a whole row; leave shift_labels out, and give each process whole rows",
            )
        for_loss = {name: options.pop(name) for name in taken if name in options}
        options.pop(_COUNT, None)
        states = model.base_model(*args, **{**options, "use_cache": False, "return_dict": True})
        return CausalLMOutputWithPast(loss=loss(head.of(model), states.last_hidden_state, labels, **for_loss))

    replace_forward(causal, forward)
    if _COUNT not in taken:
        causal.accepts_loss_kwargs = False  # so Trainer divides by the batches that it accumulates
    return model


class OffloadOptimizer(TrainerCallback):  # type: ignore[misc]
    """Keeps the optimizer's states in host memory while Trainer evaluates between two steps.

    Of several evaluation sets in one evaluation it is the first: Trainer says when a set ends, and not when all have.
    """

    def __init__(self) -> None:
        self._away: rlcore.Offloader | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, *, optimizer: Any, **unused: Any) -> None:
        if control.should_evaluate:
            self._offload(optimizer)

    def on_epoch_end(self, args: Any, state: Any, control: Any, *, optimizer: Any, **unused: Any) -> None:
        if control.should_evaluate:
            self._offload(optimizer)

    def on_evaluate(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        if self._away is not None:
            self._away.onload()  # before Trainer saves

    def _offload(self, optimizer: Any) -> None:
        if self._away is None:
            self._away = rlcore.Offloader(optimizer)
        self._away.offload("optimizer")


def _scored(head: CausalHead, hidden_BLH: Tensor, labels_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return [B, L - 1], the log-probability of each next token, and whether it counts."""
    next_BL = labels_BL[:, 1:]
    return head(hidden_BLH[:, :-1], next_BL, with_entropy=False).logprob, next_BL != IGNORED


def _keywords(loss: Loss) -> list[str]:
    parameters = inspect.signature(loss).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
