"""The dataclasses of a configuration, with AReaLite's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from rlcore.arguments import COUNT
from rlcore.engines.sampling.params import SamplingParams
from rlcore.errors import InvalidInputError, UnsupportedError


@dataclass
class GenerationHyperparameters:
    """How completions are sampled."""

    n_samples: int = 1
    max_new_tokens: int = 16384
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = int(1e8)
    temperature: float = 1.0
    stop_token_ids: list[int] | None = field(default_factory=list)

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """Return a copy with changes."""
        return replace(self, **changes)

    @property
    def sampling_params(self) -> SamplingParams:
        return SamplingParams(
            n=self.n_samples,
            max_tokens=self.max_new_tokens,
            temperature=0.0 if self.greedy else self.temperature,
            top_p=self.top_p,
            top_k=-1 if self.top_k >= 1e8 else self.top_k,
            stop_token_ids=tuple(self.stop_token_ids or ()),
        )


@dataclass
class InferenceEngineConfig:
    """How many episodes run, and how stale they may be. ``options`` are those of ``rlcore.InferenceEngine.build``."""

    max_concurrent_rollouts: int | None = None
    consumer_batch_size: int = 1
    max_head_offpolicyness: int = 0
    request_timeout: float = 3600.0
    model_path: str = ""
    executor: str = "hf"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class OptimizerConfig:
    """AdamW with a constant rate."""

    type: str = "adam"
    lr: float = 2e-5
    weight_decay: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-5
    gradient_clipping: float = 1.0
    lr_scheduler_type: str = "constant"

    def __post_init__(self) -> None:
        for name, accepted in (("type", "adam"), ("lr_scheduler_type", "constant")):
            if getattr(self, name) != accepted:
                raise UnsupportedError(
                    f"optimizer.{name}={getattr(self, name)!r}", f"only {accepted!r} is; write a module of your own"
                )


@dataclass
class MicroBatchSpec:
    """The size of a micro-batch."""

    max_tokens_per_mb: int = 16384


@dataclass
class PPOActorConfig:
    """The trainer. ``options`` are those of ``rlcore.TrainEngine.build``."""

    path: str = ""
    optimizer: OptimizerConfig | None = field(default_factory=OptimizerConfig)
    """None makes no optimizer, as for a reference model."""
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    group_size: int = 1
    group_reward_norm: bool = False
    ppo_n_minibatches: int = 4
    eps_clip: float = 0.2
    c_clip: float | None = None
    temperature: float = 1.0
    reward_scaling: float = 1.0
    reward_bias: float = 0.0
    reward_clip: float = 20.0
    discount: float = 1.0
    gae_lambda: float = 1.0
    adv_norm: bool = True
    kl_ctl: float = 0.1
    recompute_logprob: bool = False
    use_decoupled_loss: bool = False
    behav_imp_weight_cap: float | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (COUNT.has(self.ppo_n_minibatches) and COUNT.has(self.group_size)):
            raise InvalidInputError(
                "actor.ppo_n_minibatches and actor.group_size must be whole numbers of at least 1, "
                f"got {self.ppo_n_minibatches!r} and {self.group_size!r}"
            )


@dataclass
class DatasetConfig:
    """Size of the batches of a dataloader."""

    batch_size: int = 1
    path: str = ""
    type: str = ""
    shuffle: bool = True
    num_workers: int = 0
    drop_last: bool = True


@dataclass
class GRPOConfig:
    """The whole program."""

    experiment_name: str = ""
    trial_name: str = ""
    allocation_mode: str = ""
    seed: int = 1
    async_training: bool = True
    total_train_epochs: int = 1
    total_train_steps: int | None = None
    tokenizer_path: str = ""
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rollout: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    actor: PPOActorConfig = field(default_factory=PPOActorConfig)
    ref: PPOActorConfig | None = None
    train_dataset: DatasetConfig = field(default_factory=DatasetConfig)
    valid_dataset: DatasetConfig = field(default_factory=DatasetConfig)


@dataclass
class FinetuneSpec:
    """The length of a training."""

    total_train_epochs: int
    dataset_size: int
    train_batch_size: int

    def __post_init__(self) -> None:
        if not all(map(COUNT.has, (self.total_train_epochs, self.dataset_size, self.train_batch_size))):
            raise InvalidInputError(f"a FinetuneSpec takes whole numbers of at least 1, got {self}")

    @property
    def steps_per_epoch(self) -> int:
        return self.dataset_size // self.train_batch_size

    @property
    def total_train_steps(self) -> int:
        return self.total_train_epochs * self.steps_per_epoch
