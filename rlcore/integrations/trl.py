"""TRL's online trainers on rlcore: one line to adopt.

    trainer = accelerate_trl(GRPOTrainer(...))        # or RLOOTrainer
    trainer.train()

* Log-probabilities and entropies come from ``linear_logprob``, which makes no logits; TRL computes its own loss of
  them, so that every ``loss_type``, statistic and mask stays TRL's.
* The states of the optimizer are in host memory while completions are sampled and scored.
* vLLM in the trainer's process gets weights by one plan, and not tensor by tensor.

Letters: B sequences, L tokens, H a hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer.utils import FusedCausalLMOutput

import rlcore
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.integrations.causal_head import IGNORED, CausalHead, without_adapters
from rlcore.integrations.trl_vllm import PlannedSync

Trainer = TypeVar("Trainer", GRPOTrainer, RLOOTrainer)


def accelerate_trl(trainer: Trainer, *, offload_optimizer: bool = True) -> Trainer:
    """Put rlcore's kernels under a trainer that has not begun to train; return the trainer.

    Args:
        offload_optimizer: keep the optimizer's states in host memory while completions are sampled and scored. False
            saves the time of the copies, about 40 ms a gigabyte and step, where the device has room for all.

    Raises:
        InvalidInputError: it is no GRPOTrainer or RLOOTrainer.
        UnsupportedError: it trains with DeepSpeed or FSDP1, its vLLM is a server, or the logits of its model are no
            function that ``linear_logprob`` computes; the trainer is as before.
    """
    if not isinstance(trainer, GRPOTrainer | RLOOTrainer):
        raise InvalidInputError(f"accelerate_trl() takes a GRPOTrainer or RLOOTrainer, got {type(trainer).__name__}")
    _check_sharding(trainer)
    models = [without_adapters(model) for model in (trainer.model, trainer.ref_model) if model is not None]
    in_float32 = getattr(trainer.args, "cast_lm_head_to_fp32", False)
    heads = [CausalHead(model, temperature=trainer.temperature, in_float32=in_float32) for model in models]
    for model, head in zip(models, heads, strict=True):
        _use(head, model, with_entropy=model is models[0])  # TRL asks the reference for none
    if offload_optimizer:
        trainer._generate_and_score_completions = _without_optimizer(trainer)
    if trainer.use_vllm:
        trainer.vllm_generation.sync_weights = PlannedSync(trainer.vllm_generation)
    return trainer


class RlcoreGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """``GRPOTrainer`` after ``accelerate_trl``: the same arguments, losses, statistics and checkpoints."""

    def __init__(self, *args: Any, offload_optimizer: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        accelerate_trl(self, offload_optimizer=offload_optimizer)


def _check_sharding(trainer: GRPOTrainer | RLOOTrainer) -> None:
    if trainer.is_deepspeed_enabled:
        raise UnsupportedError("accelerate_trl() under DeepSpeed", "it shards the output head in a way of its own")
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 1:
        raise UnsupportedError("accelerate_trl() under FSDP1", "it has no parameters by name; set fsdp_version to 2")
    if trainer.use_vllm and trainer.vllm_generation.mode != "colocate":
        raise UnsupportedError(
            'accelerate_trl() with vllm_mode="server"',
            "the server takes weights by the engine that it was started with; docs/vllm.md has the way by rlcore_ipc",
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


def _use(head: CausalHead, model: Any, *, with_entropy: bool = True) -> None:
    """Let ``head`` answer the calls for which TRL has put a head into the model's forward."""
    original = model.forward

    @functools.wraps(type(model).forward)  # generate() checks its arguments by the signature
    def forward(*args: Any, fused_lm_head: bool = False, **options: Any) -> Any:
        if not fused_lm_head:
            return original(*args, **options)
        return _scored(head, model, with_entropy, *args, **options)

    model.forward = forward


def _scored(
    head: CausalHead,
    model: Any,
    with_entropy: bool,
    *args: Any,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    **options: Any,
) -> FusedCausalLMOutput:
    """Return TRL's output: log-probabilities and entropies [B, L - 1], or [B, L] of labels that are shifted already."""
    states = model.base_model(*args, **{**options, "use_cache": False})
    hidden_BLH = states.last_hidden_state
    if shift_labels is None:
        assert labels is not None, "TRL gives labels or shift_labels"
        hidden_BLH, labels = hidden_BLH[:, :-1], labels[:, 1:]
    else:
        labels = shift_labels
    logprob, entropy = head(hidden_BLH, labels, with_entropy=with_entropy)
    is_scored = labels != IGNORED
    count = is_scored.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    balance = _balance_loss(model, states, options) if options.get("output_router_logits") else None
    loss = -logprob.sum() / count
    return FusedCausalLMOutput(
        loss=loss if balance is None else loss + model.config.get_text_config().router_aux_loss_coef * balance,
        log_probs=logprob,
        entropy=entropy,
        label_mask=is_scored,
        aux_loss=balance,
    )


def _balance_loss(model: Any, states: Any, options: dict[str, Any]) -> Tensor:
    config = model.config.get_text_config()
    found: Tensor = load_balancing_loss_func(
        states.router_logits, config.num_experts, config.num_experts_per_tok, options.get("attention_mask")
    )
    return found
