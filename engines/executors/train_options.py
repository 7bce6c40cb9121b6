"""The options of ``train_batch``, ``eval_batch`` and ``forward_logprobs``, as a train executor is given them."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Options of all calls with a batch."""

    max_tokens_per_micro_batch: int
    temperature: float
    """The sampler's."""

    def __post_init__(self) -> None:
        value = self.max_tokens_per_micro_batch
        if not isinstance(value, int) or value < 1:
            raise InvalidInputError(f"max_tokens_per_micro_batch must be a whole number of at least 1, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions(BatchOptions):
    """The options of a batch with a loss, which are those of ``eval_batch``."""

    with_entropy: bool
    """False passes None to the loss function instead of the entropy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions(LossOptions):
    """The options of ``train_batch``."""

    max_grad_norm: float | None
    """Gradients are scaled down to this norm; None leaves them."""

    def __post_init__(self) -> None:
        LossOptions.__post_init__(self)  # with slots, super() is of the class before they were added
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise InvalidInputError(f"max_grad_norm must be above 0, or None for no limit, got {self.max_grad_norm!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions(BatchOptions):
    """The options of ``forward_logprobs``: the distribution of its log-probs."""

    top_p: float
    top_k: int
