"""AReaLite's interface over rlcore's engines: its GRPO program (tag v0.3.0-lite) with the imports changed.

AReaLite's program runs under torchrun and talks to servers that a launcher has started. Here it is one process: the
first ``initialize`` of a rollout engine builds an ``InferenceEngine`` of the model, and later ones share it, as clients
share servers. Names, defaults and formulas are AReaLite's. What is not supported is refused by name; nothing is ignored
but the settings of servers, schedulers and name services (`IGNORED`), which are not there.

Letters: N sequences, L longest sequence.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

import rlcore
from rlcore.arguments import did_you_mean
from rlcore.engines.sampling.params import SamplingParams
from rlcore.errors import InvalidInputError, MissingDependencyError, StateError, UnsupportedError
from rlcore.kernels.losses.interface import LossFn
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import decoupled_ppo, discounted_return, masked_whiten, ppo_clip
from rlcore.quickstart.pretrained import model_class
from rlcore.rollout import Episode, RolloutClient, RolloutController, Trajectory, Workflow, collate_trajectories

IGNORED = ("cluster", "launcher", "sglang", "vllm", "server", "saver", "checkpointer", "evaluator", "stats_logger")
"""Sections of a configuration that say how AReaLite starts servers and writes files."""


# -------------------------------------------------------------------------------------------- configuration


@dataclass
class GenerationHyperparameters:
    """How completions are sampled."""

    n_samples: int = 1
    max_new_tokens: int = 16384
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = int(1e8)
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)

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
            stop_token_ids=tuple(self.stop_token_ids),
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
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
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
        if self.ppo_n_minibatches < 1 or self.group_size < 1:
            raise InvalidInputError(
                "actor.ppo_n_minibatches and actor.group_size must be at least 1, "
                f"got {self.ppo_n_minibatches} and {self.group_size}"
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


def load_expr_config(argv: Sequence[str], config_class: type[Any]) -> tuple[Any, str]:
    """Read ``--config FILE.yaml key.key=value ...``; return the configuration and the file's name.

    Raises:
        InvalidInputError: an unknown field (names the nearest), or a value of another type.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDependencyError("pyyaml", needed_for="a configuration in YAML", extra="hf") from error
    if list(argv[:1]) != ["--config"] or len(argv) < 2:
        raise InvalidInputError(f"load_expr_config() takes --config FILE.yaml and then key=value, got {list(argv)!r}")
    values = yaml.safe_load(Path(argv[1]).read_text("utf-8")) or {}
    for override in argv[2:]:
        name, equals, text = override.partition("=")
        if not equals:
            raise InvalidInputError(f"an override must be key=value, got {override!r}")
        *sections, last = name.split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = yaml.safe_load(text)
    config = _filled(config_class, values, "")
    rollout, actor = getattr(config, "rollout", None), getattr(config, "actor", None)
    if rollout is not None and actor is not None and not rollout.model_path:
        rollout.model_path = actor.path
    return config, argv[1]


def _filled(kind: Any, values: Any, at: str) -> Any:
    """Return a dataclass of these values, which are checked by name and type."""
    if not isinstance(values, Mapping):
        raise InvalidInputError(f"{at or 'a configuration'} must be a mapping, got {values!r:.100}")
    hints = get_type_hints(kind)
    names = [one.name for one in fields(kind)]
    found = {}
    for name, value in values.items():
        if not at and name in IGNORED:
            continue
        if name not in names:
            hint = did_you_mean(str(name), names)
            raise InvalidInputError(f"{at}{name} is no field here{hint or ';'} accepted: {', '.join(names)}")
        found[name] = _value(hints[name], value, f"{at}{name}")
    return kind(**found)


def _value(kind: Any, value: Any, at: str) -> Any:
    kinds = list(get_args(kind)) if isinstance(kind, UnionType) else [kind]
    if value is None and type(None) in kinds:
        return None
    (kind,) = [one for one in kinds if one is not type(None)]
    if is_dataclass(kind):
        return _filled(kind, value, f"{at}.")
    plain = get_origin(kind) or kind
    if plain is float and isinstance(value, str):  # YAML reads 1e-5 as a text
        try:
            return float(value)
        except ValueError:
            pass
    if plain is float and type(value) is int:
        return float(value)
    if type(value) is not plain:
        raise InvalidInputError(f"{at} must be a {plain.__name__}, got {value!r:.100}")
    return value


@dataclass
class FinetuneSpec:
    """The length of a training."""

    total_train_epochs: int
    dataset_size: int
    train_batch_size: int

    @property
    def steps_per_epoch(self) -> int:
        return self.dataset_size // self.train_batch_size

    @property
    def total_train_steps(self) -> int:
        return self.total_train_epochs * self.steps_per_epoch


@dataclass
class WeightUpdateMeta:
    """One way of a weight update: here always ``sync_weights``, by the best route.

    AReaLite's "disk" and "nccl" (newer: "xccl") lead to the same weights; which route was taken is in ``report``.
    """

    type: str
    report: Any = None
    waiting: list[tuple[RemoteInfEngine, Future[Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.type not in ("disk", "nccl", "xccl"):
            raise UnsupportedError(f"WeightUpdateMeta(type={self.type!r})", "'disk', 'nccl' and 'xccl' are")

    @classmethod
    def from_disk(cls, *_: Any, **__: Any) -> WeightUpdateMeta:
        return cls("disk")

    @classmethod
    def from_fsdp_nccl(cls, *_: Any, **__: Any) -> WeightUpdateMeta:
        return cls("nccl")

    @classmethod
    def from_fsdp_xccl(cls, *_: Any, **__: Any) -> WeightUpdateMeta:
        return cls("xccl")


class TensorBatch(dict[str, Tensor]):
    """A padded batch in AReaLite's names; it stands in for its TensorDict."""

    def to(self, device: Any) -> TensorBatch:
        """Return it with all tensors on a device. rlcore's engines take batches on the host, too."""
        return TensorBatch({name: value.to(device) for name, value in self.items()})

    @property
    def batch_size(self) -> torch.Size:
        return self["input_ids"].shape[:1]


# ------------------------------------------------------------------------------------------------- rollout


@dataclass
class ModelRequest:
    """One prompt."""

    input_ids: list[int]
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rid: str = field(default_factory=lambda: str(uuid.uuid4()))


LLMRequest = ModelRequest


@dataclass
class ModelResponse:
    """One completion, token by token."""

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: str

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)


LLMResponse = ModelResponse


class EpisodeEngine:
    """The engine that ``arun_episode`` is given."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Sample one completion."""
        if request.gconfig.n_samples != 1:
            raise InvalidInputError(f"agenerate() takes gconfig.n_samples=1, got {request.gconfig.n_samples}")
        output = await self._client.generate(request.input_ids, request.gconfig.sampling_params)
        (one,) = output.outputs
        versions = [span.version for span in one.version_spans for _ in range(span.start, span.end)]
        return ModelResponse(list(output.prompt_token_ids), one.token_ids, one.logprobs, versions, one.finish_reason)


class RolloutWorkflow(ABC):
    """AReaLite's class of workflows."""

    @abstractmethod
    async def arun_episode(self, engine: EpisodeEngine, data: Any) -> Mapping[str, Tensor] | None:
        """Return padded tensors of the episode's sequences, or None to reject it."""


class RLVRWorkflow(RolloutWorkflow):
    """One prompt, ``gconfig.n_samples`` completions, a verifiable reward for each.

    ``reward_fn(prompt, completions, prompt_ids, completion_ids, **data) -> float``.
    """

    def __init__(
        self,
        reward_fn: Callable[..., float],
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        enable_thinking: bool = False,
        dump_dir: str | None = None,
    ) -> None:
        if dump_dir is not None:
            raise UnsupportedError("RLVRWorkflow(dump_dir=...)", "write what you want to see in reward_fn")
        self.reward_fn, self.gconfig, self.tokenizer = reward_fn, gconfig, tokenizer
        self.enable_thinking = enable_thinking

    async def arun_episode(self, engine: EpisodeEngine, data: Any) -> dict[str, Tensor]:
        prompt = self.tokenizer.apply_chat_template(
            data["messages"], tokenize=False, add_generation_prompt=True, enable_thinking=self.enable_thinking
        )
        input_ids = self.tokenizer(prompt, add_special_tokens=False).input_ids
        request = ModelRequest(input_ids, self.gconfig.new(n_samples=1))
        answers = await asyncio.gather(*(engine.agenerate(request) for _ in range(self.gconfig.n_samples)))
        rewards = [
            self.reward_fn(
                prompt=prompt,
                completions=self.tokenizer.decode(one.output_tokens, skip_special_tokens=True),
                prompt_ids=one.input_tokens,
                completion_ids=one.output_tokens,
                **data,
            )
            for one in answers
        ]
        return _padded([_trajectory(one, float(reward)) for one, reward in zip(answers, rewards, strict=True)])


class _AnyWorkflow(Workflow):
    """Runs the workflow that comes with each item."""

    async def run_episode(self, client: RolloutClient, data: Any) -> list[Trajectory] | None:
        item, workflow = data
        found = await workflow.arun_episode(EpisodeEngine(client), item)
        return None if found is None else _trajectories(found)


@dataclass
class _Server:
    """The engine that the clients of one model share."""

    engine: rlcore.InferenceEngine
    controller: RolloutController
    num_clients: int = 0


class RemoteInfEngine:
    """AReaLite's client of inference servers, ``RemoteSGLangEngine`` in its programs."""

    _servers: dict[str, _Server] = {}  # noqa: RUF012 (shared by all clients on purpose)

    def __init__(self, config: InferenceEngineConfig) -> None:
        self.config = config
        self._eval_version: int | None = None
        self._eval_items: list[tuple[Any, RolloutWorkflow]] = []
        self._loader: _Paired | None = None
        self._server: _Server | None = None

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Build the inference engine of ``config.model_path``, or share that of an earlier client."""
        if addr is not None:
            raise UnsupportedError(f"initialize(addr={addr!r})", "the engine is built here; there is no server")
        key = str(self.config.model_path)
        if key not in self._servers:
            engine = rlcore.InferenceEngine(key, executor=self.config.executor).build(**self.config.options)
            controller = RolloutController(
                engine,
                _AnyWorkflow(),
                batch_size=self.config.consumer_batch_size,
                max_staleness=self.config.max_head_offpolicyness,
                max_concurrent=self.config.max_concurrent_rollouts,
                episode_timeout_s=self.config.request_timeout,
            )
            self._servers[key] = _Server(engine, controller)
        self._server = self._servers[key]
        self._server.num_clients += 1

    def destroy(self) -> None:
        """Leave the engine; the last client closes it."""
        server, self._server = self._server, None
        if server is None:
            return
        server.num_clients -= 1
        if not server.num_clients:
            del self._servers[str(self.config.model_path)]
            server.controller.close()
            server.engine.close()

    @property
    def controller(self) -> RolloutController:
        """The ``RolloutController`` behind it."""
        if self._server is None:
            raise StateError("the rollout engine is not initialized; call initialize(None, ft_spec)")
        return self._server.controller

    def set_version(self, version: int) -> None:
        """Tell the version of the weights. One that is far ahead makes a client for evaluation, as in AReaLite."""
        if version > self.controller.version + 10**6:
            self._eval_version = version
        else:
            self.controller.set_version(version)

    def get_version(self) -> int:
        return self.controller.version if self._eval_version is None else self._eval_version

    def submit(self, data: Any, workflow: RolloutWorkflow) -> None:
        """Queue an episode."""
        if self._eval_version is not None:
            self._eval_items.append((data, workflow))
        else:
            self.controller.submit((data, workflow))

    def wait(self, count: int, timeout: float | None = None) -> TensorBatch:
        """Return a batch of ``count`` episodes."""
        if self._eval_version is not None:
            items, self._eval_items = self._eval_items[:count], self._eval_items[count:]
            return _batch(self.controller.evaluate(items, timeout_s=timeout))
        return _batch(self.controller.wait(count, timeout))

    def rollout_batch(self, data: Sequence[Any], workflow: RolloutWorkflow) -> TensorBatch:
        """Run an episode for each item now, and return their batch."""
        return _batch(self.controller.rollout_episodes([(item, workflow) for item in data]))

    def prepare_batch(self, dataloader: Any, workflow: RolloutWorkflow) -> TensorBatch:
        """Return the next batch of the asynchronous training. As in AReaLite, the first call's arguments are kept."""
        if self._loader is None:
            self._loader = _Paired(dataloader, workflow)
        return _batch(self.controller.prepare_episodes(self._loader))

    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        """Begin to wait for the weights that ``actor.upload_weights(meta)`` sends."""
        future: Future[None] = Future()
        meta.waiting.append((self, future))
        return future

    def pause(self) -> None:
        """Begin no more episodes."""
        self.controller.pause()

    def resume(self) -> None:
        self.controller.resume()


RemoteSGLangEngine = RemotevLLMEngine = RemoteInfEngine


class _Paired:
    """A dataloader whose items come with their workflow."""

    def __init__(self, dataloader: Any, workflow: RolloutWorkflow) -> None:
        self._dataloader, self._workflow = dataloader, workflow

    def __iter__(self) -> Any:
        for items in self._dataloader:
            yield [(item, self._workflow) for item in items]


# ------------------------------------------------------------------------------------------------- trainer


class FSDPPPOActor:
    """AReaLite's actor: a ``TrainEngine`` with PPO's advantages and updates; also its reference model."""

    def __init__(self, config: PPOActorConfig) -> None:
        self.config = config
        self._version = 0
        self._engine: rlcore.TrainEngine | None = None

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Build the train engine of ``config.path``."""
        if addr is not None:
            raise UnsupportedError(f"initialize(addr={addr!r})", "workers are started by rlcore.TrainEngine.build")
        with rlcore.meta_device():
            module = _actor_class(Path(self.config.path), self.config.optimizer).from_pretrained(self.config.path)
        self._engine = rlcore.TrainEngine(module).build(**self.config.options)

    def destroy(self) -> None:
        if self._engine is not None:
            self._engine.close()

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
        reward_N = (batch["rewards"] + own.reward_bias) * own.reward_scaling
        reward_N = reward_N.clip(-own.reward_clip, own.reward_clip)
        if own.group_reward_norm:
            groups = reward_N.view(-1, own.group_size)
            reward_N = ((groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-9)).flatten()
        mask_NL = batch["loss_mask"].bool()
        old_NL = batch["prox_logp"] if own.recompute_logprob and not own.use_decoupled_loss else batch["logprobs"]
        kl_NL = torch.zeros_like(old_NL)
        if "ref_logp" in batch:
            kl_NL = -own.kl_ctl * (old_NL - batch["ref_logp"]) * mask_NL
        total_NL = kl_NL.clone()
        last_N = mask_NL.shape[1] - 1 - mask_NL.flip(1).long().argmax(1)
        total_NL[torch.arange(len(last_N)), last_N] += reward_N
        # GAE without a critic: its values are 0.
        advantage_NL = discounted_return(total_NL, mask_NL, gamma=own.discount * own.gae_lambda)
        batch["advantages"] = masked_whiten(advantage_NL, mask_NL) if own.adv_norm else advantage_NL
        batch["kl_rewards"], batch["tot_rewards"] = kl_NL, total_NL

    def ppo_update(self, batch: Mapping[str, Tensor]) -> list[dict[str, float]]:
        """Take ``ppo_n_minibatches`` optimizer steps; return the metrics of each."""
        own, entries = self.config, _for_engine(batch) | {"advantages": batch["advantages"]}
        proximal = own.use_decoupled_loss or own.recompute_logprob
        entries["old_logprobs"] = batch["prox_logp" if proximal else "logprobs"]
        entries["rollout_logprobs"] = batch["logprobs"]
        clip: dict[str, Any] = {"clip_low": own.eps_clip, "clip_high": own.eps_clip, "dual_clip": own.c_clip}
        loss_fn = ppo_clip(**clip)
        if own.use_decoupled_loss:
            cap = float("inf") if own.behav_imp_weight_cap is None else own.behav_imp_weight_cap
            loss_fn = decoupled_ppo(**clip, weight_high=cap)
        rows = torch.arange(len(entries["input_ids"])).chunk(own.ppo_n_minibatches)
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
            max_grad_norm=self.config.optimizer.gradient_clipping,
            max_tokens_per_micro_batch=self.config.mb_spec.max_tokens_per_mb,
        )

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Send the weights to the engines that wait for them; their futures end then."""
        if not meta.waiting:
            raise StateError("upload_weights() finds nobody who waits; call rollout.update_weights(meta) before")
        waiting, meta.waiting = meta.waiting, []
        for rollout, future in waiting:
            try:
                meta.report = rollout.controller.update_weights(self.engine)
            except BaseException as error:
                future.set_exception(error)
                raise
            future.set_result(None)

    def save(self, folder: str | Path) -> None:
        """Write a Hugging Face model folder."""
        self.engine.export(folder)


def _actor_class(path: Path, optimizer: OptimizerConfig) -> Any:
    def on_weights_materialized(self: Any) -> None:
        self.optimizer = torch.optim.AdamW(
            self.parameters(),
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
        )

    members = {"on_weights_materialized": on_weights_materialized}
    return type("ArealActor", (HuggingFaceTrainModule, model_class(path)), members)


# ------------------------------------------------------------------------------------------------- batches


def _for_engine(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"].bool(),
        "loss_mask": batch["loss_mask"].bool(),
    }


def _trajectory(answer: ModelResponse, reward: float) -> Trajectory:
    given, made = answer.input_len, answer.output_len
    return Trajectory(
        answer.input_tokens + answer.output_tokens,
        [False] * given + [True] * made,
        [0.0] * given + answer.output_logprobs,
        [-1] * given + answer.output_versions,
        reward,
    )


def _padded(trajectories: Sequence[Trajectory]) -> TensorBatch:
    found = collate_trajectories([trajectories])
    return TensorBatch(
        input_ids=found["input_ids"],
        attention_mask=found["attention_mask"],
        loss_mask=found["loss_mask"].long(),
        logprobs=found["rollout_logprobs"],
        versions=found["versions"],
        rewards=found["rewards"],
    )


def _batch(episodes: Sequence[Episode]) -> TensorBatch:
    return _padded([one for episode in episodes for one in episode.trajectories])


def _trajectories(batch: Mapping[str, Tensor]) -> list[Trajectory]:
    """Return the rows of a workflow's tensors."""
    needed = ("input_ids", "loss_mask", "logprobs", "versions", "rewards")
    if lacking := [name for name in needed if name not in batch]:
        raise InvalidInputError(f"arun_episode() must return {', '.join(needed)}; {', '.join(lacking)} is missing")
    mask_NL = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    return [
        Trajectory(
            batch["input_ids"][row][mask_NL[row]].tolist(),
            batch["loss_mask"][row][mask_NL[row]].bool().tolist(),
            batch["logprobs"][row][mask_NL[row]].tolist(),
            batch["versions"][row][mask_NL[row]].tolist(),
            float(batch["rewards"][row]),
        )
        for row in range(len(mask_NL))
    ]
