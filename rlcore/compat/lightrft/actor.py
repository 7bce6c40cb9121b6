"""``ActorLanguage``: LightRFT's actor, whose model a train engine holds once a strategy has prepared it.

Letters: N sequences, L longest sequence, A actions (columns of new tokens), T packed tokens, S scored tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim.lr_scheduler import LambdaLR

import rlcore
from rlcore.arguments import COUNT, plain_number
from rlcore.compat.lightrft.schedule import CosineSchedule
from rlcore.engines.executors.strategy import ShardingStrategy
from rlcore.errors import InvalidInputError, StateError, UnsupportedError
from rlcore.kernels.softmax_rows import Logprobs
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import linear_logprob
from rlcore.quickstart.pretrained import model_class

_REFUSED = {
    "lora_rank": "wrap a module of your own with peft (docs/engines.md)",
    "load_in_4bit": "weights are trained in float32",
    "packing_samples": "the engine packs padded rows itself",
}
_HAS_NO_EFFECT = (
    *("use_flash_attention_2", "bf16", "lora_alpha", "lora_dropout", "target_modules", "ds_config"),
    *("device_map", "fused_linear_logprob", "disable_logprobs_flashattn"),
)
"""The strategy decides these, and log-probs are always fused with the output head."""


class ActorMethods(HuggingFaceTrainModule):
    """The steps of LightRFT's loop, which the engine runs where the weights are."""

    optimizer_settings: Mapping[str, Any] | None = None
    """Arguments of AdamW; None makes no optimizer. Weights with one dimension, such as norms, do not decay."""

    def on_weights_materialized(self) -> None:
        if self.optimizer_settings is None:
            return
        matrices = [one for one in self.parameters() if one.dim() > 1]
        vectors = [one for one in self.parameters() if one.dim() <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices, "decays": True}]
        groups.append({"params": vectors, "decays": False, "weight_decay": 0.0})
        self.optimizer = torch.optim.AdamW([one for one in groups if one["params"]], **self.optimizer_settings)
        self.scheduler = LambdaLR(self.optimizer, CosineSchedule())  # before DeepSpeed takes the optimizer over

    def set_optimizer(self, **settings: Any) -> None:
        """Set ``lr``, ``betas``, ``weight_decay`` or ``eps`` of an optimizer that has not stepped yet."""
        if unknown := settings.keys() - {"lr", "betas", "weight_decay", "eps"}:
            raise InvalidInputError(
                f"create_optimizer() has no setting {min(unknown)!r}; it takes lr, betas, weight_decay and eps"
            )
        for group in self.optimizer.param_groups:
            group.update(settings if group["decays"] else settings | {"weight_decay": 0.0})
        if "lr" in settings:
            self.scheduler.base_lrs = [settings["lr"]] * len(self.optimizer.param_groups)

    def set_schedule(self, num_warmup: int, num_steps: int) -> None:
        """Let the learning rate rise over ``num_warmup`` steps, and fall until ``num_steps``."""
        schedule = CosineSchedule(num_warmup, num_steps)
        self.scheduler.lr_lambdas = [schedule] * len(self.optimizer.param_groups)
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.base_lrs, strict=True):
            group["lr"] = rate * schedule(self.scheduler.last_epoch)

    def score_tokens(
        self,
        sharding: ShardingStrategy,
        input_ids_T: Tensor,
        cu_seqlens: Tensor,
        place_S: Tensor,
        *,
        with_entropy: bool,
    ) -> Logprobs:
        """Return log-probs [S], with their graph where gradients are wanted, of the tokens at these places."""

        def compute() -> tuple[Tensor, Tensor | None]:
            hidden_TH = self.hidden_states({"input_ids": input_ids_T, "cu_seqlens": cu_seqlens})
            head = self.output_head()
            return linear_logprob(
                hidden_TH[place_S - 1], targets=input_ids_T[place_S], with_entropy=with_entropy, **head._asdict()
            )

        if torch.is_grad_enabled():  # weights stay gathered until accumulate()
            return Logprobs(*sharding.forward(compute))
        with sharding.computing():
            return Logprobs(*sharding.forward(compute))

    def accumulate(self, sharding: ShardingStrategy, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradients of a loss to those of the step."""
        with sharding.computing():
            sharding.backward(loss, is_last=is_last)

    def step_optimizer(self, sharding: ShardingStrategy, max_norm: float | None) -> float:
        """Clip and step, unless the norm of the gradients is not finite; drop them and return the norm."""
        norms: list[Tensor] = []
        try:
            sharding.step(max_norm, norms.append)
        finally:
            sharding.zero()
        return float(norms[0])


class ActorLanguage(nn.Module):
    """LightRFT's actor of text. ``model`` is on the meta device until a strategy prepares the actor."""

    is_actor = True

    def __init__(self, pretrain_or_model: str | Path, *, high_entropy_token_ratio: float = 0.0, **kwargs: Any) -> None:
        super().__init__()
        for name, value in kwargs.items():
            if name in _REFUSED and value:
                raise UnsupportedError(f"ActorLanguage({name}={value!r})", _REFUSED[name])
            if name not in _REFUSED and name not in _HAS_NO_EFFECT:
                accepted = ("high_entropy_token_ratio", *_HAS_NO_EFFECT)
                raise InvalidInputError(f"ActorLanguage has no argument {name!r}; it takes {', '.join(accepted)}")
        self.pretrain = Path(pretrain_or_model)
        self.high_entropy_token_ratio = high_entropy_token_ratio
        with rlcore.meta_device():
            kind: Any = type("LightRFTActor", (ActorMethods, model_class(self.pretrain)), {})
            self.model = kind.from_pretrained(self.pretrain)
        self._vocab_size = self.model.output_head().weight.shape[0]
        self._engine: rlcore.TrainEngine | None = None
        self._sharding: Any = None

    @property
    def engine(self) -> rlcore.TrainEngine:
        """The ``rlcore.TrainEngine`` behind it."""
        if self._engine is None:
            raise StateError("the actor is not prepared; call strategy.prepare_model(actor)")
        return self._engine

    @property
    def is_prepared(self) -> bool:
        return self._engine is not None

    def build(self, executor: str, optimizer: Mapping[str, Any] | None, **options: Any) -> None:
        """Build the engine; from then on ``model`` is the module that it trains, in this process."""
        self.model.optimizer_settings = optimizer
        engine = rlcore.TrainEngine(self.model, executor=executor).build(**options)
        worker = engine.executors[0].workers[0].worker
        self._engine, self.model, self._sharding = engine, worker.module, worker.strategy

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradients of a loss to those of the step, over all ranks."""
        self.engine.call("accumulate", self._sharding, loss, is_last=is_last)

    def step(self, max_norm: float | None) -> float:
        """Clip, step and drop the gradients; return their norm."""
        norm: float = self.engine.call("step_optimizer", self._sharding, max_norm, gather="first")
        return norm

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None) -> None:
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs or {"use_reentrant": False})

    def gradient_checkpointing_disable(self) -> None:
        self.model.gradient_checkpointing_disable()

    def forward(
        self,
        sequences: Tensor,
        num_actions: int | None = None,
        attention_mask: Tensor | None = None,
        return_output: bool = False,
        packed_seq_lens: list[int] | None = None,
    ) -> Any:
        """Return the log-probs [N, A] of the last ``num_actions`` columns, 0 where the mask is, with their graph.

        Args:
            sequences: [N, L], padded on either side.
            return_output: also return a dict, with ``action_entropy`` [N, A] where ``high_entropy_token_ratio`` is
                above 0. There are no logits in it: they are never made whole.
        """
        if num_actions is None or packed_seq_lens is not None:
            raise UnsupportedError(
                f"ActorLanguage.forward(num_actions={num_actions!r}, packed_seq_lens={packed_seq_lens!r})",
                "give padded rows and the number of actions: it returns log-probs, and packs rows itself",
            )
        mask_NL = torch.ones_like(sequences) if attention_mask is None else attention_mask
        _check_rows(sequences, mask_NL, num_actions, self._vocab_size)
        mask_NL = mask_NL.bool()
        scored_NL = mask_NL & (mask_NL.cumsum(1) > 1)  # nothing precedes a first token
        scored_NL[:, : sequences.shape[1] - num_actions] = False
        place_NL = mask_NL.flatten().cumsum(0).view_as(mask_NL) - 1
        cu_seqlens = pad(mask_NL.sum(1).cumsum(0), (1, 0)).to("cpu", torch.int32)
        device = next(self.model.parameters()).device
        found = self.engine.call(
            "score_tokens",
            self._sharding,
            sequences[mask_NL].to(device),
            cu_seqlens,
            place_NL[scored_NL].to(device),
            with_entropy=self.high_entropy_token_ratio > 0,
            gather="first",
        )
        scored_NL = scored_NL.to(device)

        def actions(value_S: Tensor) -> Tensor:
            value_NL = torch.zeros(scored_NL.shape, device=device).masked_scatter(scored_NL, value_S.float())
            return value_NL[:, -num_actions:]

        if not return_output:
            return actions(found.logprob)
        return actions(found.logprob), {} if found.entropy is None else {"action_entropy": actions(found.entropy)}


def _check_rows(sequences: Tensor, attention_mask: Tensor, num_actions: int, vocab_size: int) -> None:
    """Refuse what would be another's error in a worker, or on a GPU its end."""
    given = {"sequences": sequences, "attention_mask": attention_mask}
    if not all(isinstance(one, Tensor) and one.dim() == 2 and one.shape == sequences.shape for one in given.values()):
        shapes = ", ".join(f"{name} {list(getattr(one, 'shape', ())) or type(one)}" for name, one in given.items())
        raise InvalidInputError(f"ActorLanguage takes tensors [N, L] as sequences and attention_mask, got {shapes}")
    if not (COUNT.has(plain_number(num_actions)) and num_actions <= sequences.shape[1]):
        raise InvalidInputError(
            f"num_actions counts the last columns of sequences, 1 to {sequences.shape[1]}; got {num_actions!r}"
        )
    token_T = sequences[attention_mask != 0]
    if not len(token_T):
        raise InvalidInputError("attention_mask is 0 everywhere; leave such a batch out")
    if token_T.is_floating_point() or not 0 <= int(token_T.min()) <= int(token_T.max()) < vocab_size:
        raise InvalidInputError(
            f"sequences must hold token ids, 0 to {vocab_size - 1}, where attention_mask is not 0; got {token_T.dtype} "
            f"{token_T.min().item()} to {token_T.max().item()}"
        )
