"""TRL's trainers on rlcore: one line to adopt.

    trainer = accelerate_trl(GRPOTrainer(...))        # or RLOOTrainer, DPOTrainer, KTOTrainer, SFTTrainer
    trainer.train()

* Log-probabilities, entropies and numbers of a row come from ``linear_logprob``, which makes no logits; TRL computes
  its own loss of them, so that every ``loss_type``, statistic and mask stays TRL's.
* Of trainers that sample, the states of the optimizer are in host memory while completions are sampled and scored.
* vLLM gets weights by one plan, and not tensor by tensor; in the trainer's process it writes no text that nobody reads.

Letters: B sequences, L tokens, H a hidden size.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer, SFTTrainer
from trl.trainer.utils import FusedCausalLMOutput

import rlcore
from rlcore.arguments import FLAG, takes
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.integrations.causal_head import IGNORED, CausalHead, replace_forward, without_adapters
from rlcore.integrations.trl_server import ServedSync, takes_weights_of_rlcore, weights_by_rlcore
from rlcore.integrations.trl_vllm import PlannedSync
from rlcore.ops import Logprobs

Trainer = TypeVar("Trainer", GRPOTrainer, RLOOTrainer, DPOTrainer, KTOTrainer, SFTTrainer)

_ROW_STATS: dict[type, tuple[str, ...]] = {
    GRPOTrainer: (),
    RLOOTrainer: (),
    DPOTrainer: ("mean_logit", "is_top1"),
    KTOTrainer: ("mean_logit",),
    SFTTrainer: ("is_top1",),
}
"""The ``row_stats`` that a trainer reports."""
_TRAINERS: Any = tuple(_ROW_STATS)


@takes("accelerate_trl()", offload_optimizer=FLAG)
def accelerate_trl(trainer: Trainer, *, offload_optimizer: bool = True) -> Trainer:
    """Put rlcore's kernels under a trainer that has not begun to train; return the trainer.

    Args:
        offload_optimizer: keep the optimizer's states in host memory while completions are sampled and scored. False
            saves the time of the copies, about 40 ms a gigabyte and step, where the device has room for all. Trainers
            that sample nothing keep them on the device in any case.

    Raises:
        InvalidInputError: it is none of these trainers, or ``offload_optimizer`` is no bool.
        UnsupportedError: it trains with DeepSpeed or FSDP1, its vLLM is a server that takes weights of TRL, or the
            logits of its model are no function that ``linear_logprob`` computes; the trainer is as before.
    """
    if not isinstance(trainer, _TRAINERS):
        *others, last = (cls.__name__ for cls in _TRAINERS)
        raise InvalidInputError(f"accelerate_trl() takes a {', '.join(others)} or {last}, got {type(trainer).__name__}")
    _check_sharding(trainer)
    in_float32 = getattr(trainer.args, "cast_lm_head_to_fp32", False)
    measured = functools.partial(CausalHead, temperature=getattr(trainer, "temperature", 1.0), in_float32=in_float32)
    model, reference = without_adapters(trainer.model), getattr(trainer, "ref_model", None)
    head = measured(model)
    if reference is not None:
        reference = without_adapters(reference)
        # TRL reads its log-probabilities alone. The forward that is replaced was under autocast: TRL has prepared it.
        _use(measured(reference), reference, with_entropy=False, context=trainer.accelerator.autocast)
    _use(head, model, row_stats=_row_stats(trainer))
    if isinstance(trainer, GRPOTrainer | RLOOTrainer):
        if offload_optimizer:
            trainer._generate_and_score_completions = _without_optimizer(trainer)
        if trainer.use_vllm:
            _use_plan(trainer.vllm_generation)
    return trainer


def _use_plan(generation: Any) -> None:
    """Let vLLM get weights by rlcore's plan; in this process also let it write no text beside the tokens.

    TRL reads no text, and vLLM needs it for nothing but strings that stop.
    """
    if generation.mode == "server":
        generation.sync_weights = ServedSync(generation)
        return
    generation.sync_weights = PlannedSync(generation)
    if not generation.generation_kwargs.get("stop"):
        generation.generation_kwargs = {"detokenize": False, **generation.generation_kwargs}


def _row_stats(trainer: Any) -> tuple[str, ...]:
    """Return what TRL's own head is asked for besides log-probabilities and entropies."""
    found = next(names for cls, names in _ROW_STATS.items() if isinstance(trainer, cls))
    is_weighted = isinstance(trainer, DPOTrainer) and trainer.use_weighting
    return (*found, "sum_squares") if is_weighted else found


class RlcoreGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """``GRPOTrainer`` after ``accelerate_trl``: the same arguments, losses, statistics and checkpoints."""

    def __init__(self, *args: Any, offload_optimizer: bool = True, **options: Any) -> None:
        with weights_by_rlcore():
            super().__init__(*args, **options)
        accelerate_trl(self, offload_optimizer=offload_optimizer)


def _check_sharding(trainer: Any) -> None:
    if trainer.is_deepspeed_enabled:
        raise UnsupportedError("accelerate_trl() under DeepSpeed", "it shards the output head in a way of its own")
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 1:
        raise UnsupportedError("accelerate_trl() under FSDP1", "it has no parameters by name; set fsdp_version to 2")
    is_served = getattr(trainer, "use_vllm", False) and trainer.vllm_generation.mode == "server"
    if is_served and not takes_weights_of_rlcore(trainer.vllm_generation):
        raise UnsupportedError(
            'accelerate_trl() with vllm_mode="server" after TRL has opened its NCCL group with the server',
            "make the trainer inside weights_by_rlcore(), or an RlcoreGRPOTrainer, which does so (docs/trl.md)",
        )


def _without_optimizer(trainer: GRPOTrainer | RLOOTrainer) -> Callable[..., Any]:
    """Return the trainer's method that samples and scores, with the optimizer's states in host memory meanwhile."""
    original: Callable[..., Any] = trainer._generate_and_score_completions

    @functools.wraps(original)
    def sample(*args: Any) -> Any:
        optimizer = trainer.optimizer
        if optimizer is None or not optimizer.state:  # before the first step
            return original(*args)
        with rlcore.offloaded(optimizer):
            return original(*args)

    return sample


def _use(
    head: CausalHead,
    model: Any,
    *,
    with_entropy: bool = True,
    row_stats: Sequence[str] = (),
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> None:
    """Let ``head`` answer the calls for which TRL has put a head into the model's forward, within ``context``."""

    def forward(
        model: Any, original: Callable[..., Any], *args: Any, fused_lm_head: bool = False, **options: Any
    ) -> Any:
        if not fused_lm_head:
            return original(*args, **options)
        with context():
            scored = functools.partial(head.of(model), with_entropy=with_entropy, row_stats=row_stats)
            return _scored(scored, model, *args, **options)

    replace_forward(model, forward)


def _scored(
    head: Callable[[Tensor, Tensor], Logprobs],
    model: Any,
    *args: Any,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    **options: Any,
) -> FusedCausalLMOutput:
    """Return TRL's output: numbers [B, L - 1] of each next label, or [B, L] of labels that are shifted already."""
    states = model.base_model(*args, **{**options, "use_cache": False})
    hidden_BLH = states.last_hidden_state
    if shift_labels is None:
        assert labels is not None, "TRL gives labels or shift_labels"
        hidden_BLH, labels = hidden_BLH[:, :-1], labels[:, 1:]
    else:
        labels = shift_labels
    found = head(hidden_BLH, labels)
    sum_squares = found.row_stats.get("sum_squares")
    is_scored = labels != IGNORED
    count = is_scored.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    balance = _balance_loss(model, states, options) if options.get("output_router_logits") else None
    loss = -found.logprob.sum() / count
    coefficient = getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0)
    return FusedCausalLMOutput(
        loss=loss if balance is None else loss + coefficient * balance,
        log_probs=found.logprob,
        entropy=found.entropy,
        log_sum_sq_probs=None if sum_squares is None else sum_squares.log().where(is_scored, 0.0),
        mean_logits=found.row_stats.get("mean_logit"),
        is_top1=found.row_stats.get("is_top1"),
        label_mask=is_scored,
        aux_loss=balance,
    )


def _balance_loss(model: Any, states: Any, options: dict[str, Any]) -> Tensor:
    config = model.config.get_text_config()
    found: Tensor = load_balancing_loss_func(
        states.router_logits, config.num_experts, config.num_experts_per_tok, options.get("attention_mask")
    )
    return found
