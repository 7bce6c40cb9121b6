"""``FSDPPPOActor``: AReaLite's actor, over a ``TrainEngine``.

Letters: N sequences, L longest sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

import rlcore
from rlcore.arguments import kind_of, takes
from rlcore.compat.areal.configuration import FinetuneSpec, OptimizerConfig, PPOActorConfig
from rlcore.compat.areal.inference_engine import META, WeightUpdateMeta
from rlcore.engines.sampling.model_folder import check_model_folder
from rlcore.errors import InvalidInputError, StateError, UnsupportedError
from rlcore.kernels.losses.interface import LossFn
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import decoupled_ppo, discounted_return, ppo_clip
from rlcore.quickstart.pretrained import model_class
from rlcore.rollout import RolloutController


class FSDPPPOActor:
    """AReaLite's actor: a ``TrainEngine`` with PPO's advantages and updates; also its reference model."""

    @takes("FSDPPPOActor", config=kind_of("a PPOActorConfig", PPOActorConfig))
    def __init__(self, config: PPOActorConfig) -> None:
        self.config = config
        self._version = 0
        self._engine: rlcore.TrainEngine | None = None

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Build the train engine of ``config.path``."""
        if addr is not None:
            raise UnsupportedError(f"initialize(addr={addr!r})", "workers are started by rlcore.TrainEngine.build")
        if self._engine is not None:
            return
        check_model_folder(self.config.path)
        with rlcore.meta_device():
            module = _actor_class(Path(self.config.path), self.config.optimizer).from_pretrained(self.config.path)
        self._engine = rlcore.TrainEngine(module).build(**self.config.options)

    def destroy(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    @property
    def engine(self) -> rlcore.TrainEngine:
        """The ``rlcore.TrainEngine`` behind it."""
        if self._engine is None:
            raise StateError("the actor is not initialized; call initialize(None, ft_spec)")
        return self._engine

    @property
    def device(self) -> torch.device:
        """The host: batches go to the workers from there."""
        return torch.device("cpu")

    def train(self, mode: bool = True) -> Self:
        self.engine.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    def set_version(self, version: int) -> None:
        self._version = version

    def get_version(self) -> int:
        return self._version

    def step_lr_scheduler(self) -> None:
        """Do nothing: the rate is constant, and schedulers of a module step with ``train_batch``."""

    def compute_logp(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probs of the sampled tokens now, [N, L]; position t is token t, and not t + 1 as there."""
        return self.engine.forward_logprobs(
            _for_engine(batch),
            temperature=self.config.temperature,
            max_tokens_per_micro_batch=self.config.mb_spec.max_tokens_per_mb,
        )

    forward = forward_batch = compute_logp

    def compute_advantages(self, batch: dict[str, Tensor]) -> None:
        """Add ``advantages``, ``kl_rewards`` and ``tot_rewards`` [N, L] to the batch, by AReaLite's formulas."""
        own = self.config
        recomputed = own.recompute_logprob and not own.use_decoupled_loss
        _expect(batch, "rewards", "logprobs", "loss_mask", *(("prox_logp",) if recomputed else ()))
        given_N, mask_NL = torch.as_tensor(batch["rewards"]), batch["loss_mask"].bool()
        if given_N.shape != mask_NL.shape[:1]:
            raise InvalidInputError(
                f"rewards must be [N] = {list(mask_NL.shape[:1])}, one a row; got {list(given_N.shape)}"
            )
        reward_N = (given_N + own.reward_bias) * own.reward_scaling
        reward_N = reward_N.clip(-own.reward_clip, own.reward_clip)
        if own.group_reward_norm:
            if own.group_size < 2 or len(reward_N) % own.group_size:
                raise InvalidInputError(
                    "group_reward_norm takes rows in whole groups of actor.group_size, which is at least 2; got "
                    f"{len(reward_N)} rows and group_size={own.group_size}"
                )
            groups = reward_N.view(-1, own.group_size)
            reward_N = ((groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-9)).flatten()
        old_NL = batch["prox_logp" if recomputed else "logprobs"]
        # Without a reference, its log-probs are 0.
        kl_NL = torch.where(mask_NL, -own.kl_ctl * (old_NL - batch.get("ref_logp", 0.0)), 0.0)
        total_NL = kl_NL.clone()
        last_N = mask_NL.shape[1] - 1 - mask_NL.flip(1).long().argmax(1)
        total_NL[torch.arange(len(last_N)), last_N] += reward_N
        # GAE without a critic: its values are 0.
        advantage_NL = discounted_return(total_NL, mask_NL, gamma=own.discount * own.gae_lambda)
        batch["advantages"] = _normalized(advantage_NL, mask_NL) if own.adv_norm else advantage_NL
        batch["kl_rewards"], batch["tot_rewards"] = kl_NL, total_NL

    def ppo_update(self, batch: Mapping[str, Tensor]) -> list[dict[str, float]]:
        """Take ``ppo_n_minibatches`` optimizer steps; return the metrics of each."""
        own = self.config
        old = "prox_logp" if own.use_decoupled_loss or own.recompute_logprob else "logprobs"
        _expect(batch, *dict.fromkeys(("logprobs", "advantages", old)))
        entries = _for_engine(batch) | {"advantages": batch["advantages"], "old_logprobs": batch[old]}
        entries["rollout_logprobs"] = batch["logprobs"]
        clip: dict[str, Any] = {"clip_low": own.eps_clip, "clip_high": own.eps_clip, "dual_clip": own.c_clip}
        loss_fn = ppo_clip(**clip)
        if own.use_decoupled_loss:
            cap = float("inf") if own.behav_imp_weight_cap is None else own.behav_imp_weight_cap
            loss_fn = decoupled_ppo(**clip, weight_high=cap)
        parts = torch.arange(len(entries["input_ids"])).tensor_split(own.ppo_n_minibatches)
        rows = [part for part in parts if len(part)]
        return [self.train_batch({name: value[one] for name, value in entries.items()}, loss_fn) for one in rows]

    def train_batch(self, input_: Mapping[str, Tensor], loss_fn: LossFn) -> dict[str, float]:
        """Take one optimizer step.

        Args:
            loss_fn: in rlcore's form, one value a token; weights of tokens are those of the mean over all of them,
                which AReaLite's ``loss_weight_fn`` counts.
        """
        return self.engine.train_batch(
            input_,
            loss_fn,
            temperature=self.config.temperature,
            max_grad_norm=self.config.optimizer.gradient_clipping if self.config.optimizer else None,
            max_tokens_per_micro_batch=self.config.mb_spec.max_tokens_per_mb,
        )

    @takes("upload_weights()", meta=META)
    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Send the weights to the engines that wait for them; their futures end then."""
        if not meta.waiting:
            raise StateError("upload_weights() finds nobody who waits; call rollout.update_weights(meta) before")
        waiting, meta.waiting = meta.waiting, []
        updated: set[RolloutController] = set()  # clients of one model share one, which has one more version then
        for rollout, future in waiting:
            try:
                if rollout.controller not in updated:
                    meta.report = rollout.controller.update_weights(self.engine)
                    updated.add(rollout.controller)
            except BaseException as error:
                for _, other in waiting:  # no later call ends the futures of those after it
                    if not other.done():
                        other.set_exception(error)
                raise
            future.set_result(None)

    def save(self, folder: str | Path) -> None:
        """Write a Hugging Face model folder."""
        self.engine.export(folder)


def _actor_class(path: Path, optimizer: OptimizerConfig | None) -> Any:
    def on_weights_materialized(self: Any) -> None:
        if optimizer is None:
            return
        self.optimizer = torch.optim.AdamW(
            self.parameters(),
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
        )

    members = {"on_weights_materialized": on_weights_materialized}
    return type("ArealActor", (HuggingFaceTrainModule, model_class(path)), members)


def _normalized(value_NL: Tensor, mask_NL: Tensor) -> Tensor:
    """Return ``(value - mean) / (sqrt(variance) + 1e-5)`` where the mask is, and 0 elsewhere; the variance is biased.

    That is ``masked_normalization`` of AReaLite (areal/utils/functional.py at tag v0.3.0-lite), in its float64.
    """
    count = mask_NL.sum().clamp(min=1)
    wide_NL = torch.where(mask_NL, value_NL.double(), 0.0)
    centred_NL = torch.where(mask_NL, wide_NL - wide_NL.sum() / count, 0.0)
    return (centred_NL / ((centred_NL.square().sum() / count).sqrt() + 1e-5)).float()


def _expect(batch: Mapping[str, Tensor], *names: str) -> None:
    if lacking := [name for name in names if name not in batch]:
        raise InvalidInputError(f"the batch needs {', '.join(names)}; {', '.join(lacking)} is missing")


def _for_engine(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    _expect(batch, "input_ids", "attention_mask", "loss_mask")
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"].bool(),
        "loss_mask": batch["loss_mask"].bool(),
    }
