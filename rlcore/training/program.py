"""The program of ``rlcore train``: rollout, training, weight sync, evaluation and checkpoints, step by step.

It is made of public pieces alone. A program that needs more than a configuration can say begins as a copy of it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rlcore
from rlcore import ops
from rlcore.engines.sampling.model_folder import check_model_folder
from rlcore.errors import InvalidInputError, RolloutError, one_line
from rlcore.nn import HuggingFaceTrainModule
from rlcore.quickstart.interrupt import Interrupt, Interrupted
from rlcore.quickstart.pretrained import model_class
from rlcore.rollout import (
    Episode,
    RewardPool,
    RolloutController,
    SingleTurn,
    Trajectory,
    Workflow,
    collate_trajectories,
)
from rlcore.rollout.workflow import WORKFLOW
from rlcore.training.config import TrainConfig
from rlcore.training.items import ShuffledItems, function_of, items_of, result_of
from rlcore.training.run_folder import Trackers, TrainFolder


class TrainProgram:
    """One run.

    Args:
        home: the folder where modules that the configuration names are looked for.
        say: is given a line for each step.
    """

    def __init__(self, config: TrainConfig, home: Path, folder: TrainFolder, say: Callable[[str], None]) -> None:
        self.config, self.folder, self._say = config, folder, say
        self._stack = contextlib.ExitStack()
        torch.manual_seed(config.seed)
        data = config.data
        self._reward: Any = data.reward and function_of(data.reward, home)
        need_prompt = config.rollout.workflow is None
        self._items = ShuffledItems(items_of(data.train, home, need_prompt=need_prompt), config.seed)
        self._held_out = (
            items_of(data.held_out, home, need_prompt=need_prompt, are_saved=False) if data.held_out else []
        )
        self._own_workflow = config.rollout.workflow and _workflow_of(config, home)
        check_model_folder(config.model)
        with rlcore.meta_device():
            self._module = policy_class(config).from_pretrained(config.model)
        self._samplers = [
            rlcore.InferenceEngine(config.model, executor=config.sampler.executor)
            for _ in range(config.sampler.replicas)
        ]

    def run(self, interrupt: Interrupt) -> None:
        """Run the steps that are left. Raises Interrupted between two steps, with everything saved."""
        with self._stack:
            self._start()
            interrupt.begin_steps()
            if self._step == 0:
                self._record({"step": 0} | self._evaluate())
            while self._step < self.config.steps:
                self._do_step(interrupt)
            self._finish()

    # ------------------------------------------------------------------------------------------------ start

    def _start(self) -> None:
        own = self.config
        self._trackers = Trackers(own.metrics)
        self.train = self._stack.enter_context(rlcore.TrainEngine(self._module, executor=own.trainer.executor))
        self.train.build(
            devices=own.trainer.devices,
            launcher=own.trainer.launcher,
            data_parallel_size=own.trainer.data_parallel_size,
            **own.trainer.options,
        )
        extra = self.train.load(self.folder.checkpoint) if self.folder.has_checkpoint else None
        self._step = self._first = extra["step"] if extra else 0
        if self._step > own.steps:
            raise InvalidInputError(
                f"{self.folder.path} holds a run of {self._step} steps, and steps is {own.steps}; give as many or more"
            )
        if extra:
            self._check_items(extra)
        self._build_samplers()
        self._workflow, self._answer = self._workflows()
        self.rollout = self._stack.enter_context(
            RolloutController(
                self._samplers,
                self._workflow,
                batch_size=own.rollout.batch_size,
                max_staleness=own.rollout.max_staleness,
                pacing=own.rollout.pacing,
                max_concurrent=own.rollout.max_concurrent,
                accept=has_different_rewards if own.rollout.drop_equal_groups else None,
                episode_timeout_s=own.rollout.episode_timeout_s,
            )
        )
        if extra:
            self.rollout.load_state_dict(extra["rollout"])
        with self._devices_for_training():
            self._sync(self.rollout.version)
        # Not earlier: a run that cannot start leaves the folder as it was.
        if extra:
            self.folder.go_on(self._step)
        else:
            self.folder.begin()
        self._stack.callback(self._trackers.close)
        self._trackers.begin(self.folder.path, own.plain())

    def _check_items(self, extra: dict[str, Any]) -> None:
        """Refuse to go on among other items; a checkpoint that is older than the digest has none."""
        if extra.get("items", self._items.digest) != self._items.digest:
            raise InvalidInputError(
                f"cannot resume {self.folder.path}: the items of data.train ({self.config.data.train}) have changed, "
                "and some would be trained on twice or never; give them as they were, or another output="
            )

    def _build_samplers(self) -> None:
        own = self.config.sampler
        options = {"tensor_parallel_size": own.tensor_parallel_size, "launcher": own.launcher} | own.options
        share = len(own.devices) // own.replicas if isinstance(own.devices, list) else 0
        if self._is_shared:
            self.train.offload()
            options["colocate_with"] = self.train
        for index, engine in enumerate(self._samplers):
            devices = own.devices[index * share :][:share] if isinstance(own.devices, list) else own.devices
            self._stack.enter_context(engine).build(devices=devices, **options)

    def _workflows(self) -> tuple[Workflow, Workflow]:
        """Return the workflow of training and that of evaluation."""
        own = self.config.rollout
        if self._own_workflow:
            return self._own_workflow, self._own_workflow
        pool = None
        if own.reward_processes:
            pool = self._stack.enter_context(RewardPool(own.reward_processes, timeout_s=own.reward_timeout_s))
        params = {"max_tokens": own.max_tokens}
        answer = params | {"temperature": self.config.evaluation.temperature}
        sample = params | {"temperature": own.temperature, "n": own.samples}
        return SingleTurn(self._reward, sample, pool=pool), SingleTurn(self._reward, answer, pool=pool)

    # ------------------------------------------------------------------------------------------------ steps

    def _do_step(self, interrupt: Interrupt) -> None:
        began = time.perf_counter()
        episodes = self._asked(lambda: self.rollout.prepare_episodes(self._items))
        waited_s = time.perf_counter() - began
        records = [self._episode_record(one) for one in episodes]
        with self._devices_for_training():
            metrics = self._learn(collate_trajectories([one.trajectories for one in episodes]))
            self._sync()
        self._step += 1
        metrics |= {"step": self._step} | _of_episodes(records) | {"wait_s": waited_s}
        metrics["step_s"] = time.perf_counter() - began
        is_last = self._step == self.config.steps
        if is_last or self._step % self.config.evaluation.every == 0:
            metrics |= self._evaluate()
        self.folder.append("episodes", records)
        self._record(metrics)
        if is_last or interrupt.is_requested or self._step % self.config.checkpoint.every == 0:
            self._save()
        if interrupt.is_requested:
            raise Interrupted

    def _learn(self, batch: dict[str, Tensor]) -> dict[str, float]:
        """Take the optimizer steps of a batch; return the metrics of the last."""
        own, temperature = self.config.algorithm, self.config.rollout.temperature
        options: dict[str, Any] = {
            "temperature": temperature,
            "max_tokens_per_micro_batch": self.config.trainer.max_tokens_per_micro_batch,
        }
        batch["advantages"] = ops.group_advantage(batch["rewards"], group=batch["group"], mode=own.advantage)
        batch["old_logprobs"] = self.train.forward_logprobs(batch, **options)
        loss_fn = getattr(ops, own.loss)(**own.loss_options)
        generator = torch.Generator().manual_seed((self.config.seed + self._step) % 2**63)
        metrics: dict[str, float] = {}
        order = torch.randperm(len(batch["rewards"]), generator=generator)
        for rows in order.tensor_split(min(own.minibatches, len(order))):  # a workflow may give fewer trajectories
            minibatch = {name: values[rows] for name, values in batch.items()}
            metrics = self.train.train_batch(minibatch, loss_fn, max_grad_norm=own.max_grad_norm, **options)
        return metrics

    def _asked(self, ask: Callable[[], list[Episode]]) -> list[Episode]:
        """Return what the samplers answer. If none is left they are started again, once, and asked anew."""
        try:
            return ask()
        except RolloutError:
            if self.rollout.num_healthy or self._is_shared:
                raise
            self._say("no sampler is left: they are started again")
            self._sync(self.rollout.version)
            return ask()

    def _sync(self, version: int | None = None) -> None:
        """Give the samplers the weights; None is the next version."""
        if self._is_shared:
            self.train.offload("optimizer", "grads")
            self._samplers[0].onload("weights")
        self.rollout.update_weights(self.train, version=version)

    def _save(self) -> None:
        with self._devices_for_training(keeps_samplers=True):
            state = {"step": self._step, "items": self._items.digest, "rollout": self.rollout.state_dict()}
            self.train.save(self.folder.checkpoint, state)

    def _finish(self) -> None:
        if self._step == self._first and self.folder.model.exists():
            return  # it had ended, and a scheduler has begun it once more
        self.rollout.timeline.save(self.folder.timeline(self._first))
        with self._devices_for_training(keeps_samplers=True):
            self.train.export(self.folder.model)
        self._say(str(self.rollout.stats))

    @property
    def _is_shared(self) -> bool:
        return self.config.placement == "shared"

    @contextlib.contextmanager
    def _devices_for_training(self, *, keeps_samplers: bool = False) -> Iterator[None]:
        """Inside, the trainer is on its devices. Where the sampler shares them, it is away, and generates nothing.

        Args:
            keeps_samplers: its weights stay those that they are; else they come of a sync inside.
        """
        if not self._is_shared:
            yield
            return
        (sampler,) = self._samplers
        with self.rollout.generation_paused():
            sampler.offload() if keeps_samplers else sampler.meta()
            self.train.onload()
            yield
            self.train.offload()
            sampler.onload()

    # -------------------------------------------------------------------------------------------- reporting

    def _evaluate(self) -> dict[str, float]:
        if not self._held_out:
            return {}
        began = time.perf_counter()
        try:
            episodes = self._asked(lambda: self.rollout.evaluate(self._held_out, self._answer))
        except RolloutError as error:
            if self._step == 0 or not self.rollout.num_healthy:  # before the first step nothing is lost
                raise
            self._say(f"step {self._step} has no held_out_reward: {one_line(error)}")
            return {}
        rewards = [sum(t.reward for t in one.trajectories) / len(one.trajectories) for one in episodes]
        return {"held_out_reward": sum(rewards) / len(self._held_out), "evaluate_s": time.perf_counter() - began}

    def _episode_record(self, episode: Episode) -> dict[str, Any]:
        oldest = episode.oldest_version
        return {
            "step": self._step + 1,
            "number": episode.number,
            "item": episode.data,
            "rewards": [one.reward for one in episode.trajectories],
            "staleness": 0 if oldest is None else self.rollout.version - oldest,
        }

    def _record(self, metrics: dict[str, float]) -> None:
        self.folder.append("metrics", [metrics])
        self._trackers.add(metrics)
        shown = [
            name for name in ("reward", "loss", "staleness", "held_out_reward", "wait_s", "step_s") if name in metrics
        ]
        self._say(
            "  ".join([f"step {self._step}/{self.config.steps}", *(f"{name} {metrics[name]:.3g}" for name in shown)])
        )


def _workflow_of(config: TrainConfig, home: Path) -> Workflow:
    """Return the workflow that the function of ``rollout.workflow`` makes."""
    reference = str(config.rollout.workflow)
    workflow: Workflow = result_of(reference, function_of(reference, home), config)
    if not WORKFLOW.has(workflow):
        raise InvalidInputError(f"{reference} must return {WORKFLOW.words} got {workflow!r:.100}")
    return workflow


class ConfiguredPolicy(HuggingFaceTrainModule):
    """Mixed into the model's own class by ``policy_class``: the optimizer and the schedule of a configuration."""

    trained_by: TrainConfig

    def on_weights_materialized(self) -> None:
        own = self.trained_by.algorithm
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=own.learning_rate, weight_decay=own.weight_decay)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, partial(rate_factor, self.trained_by))


def policy_class(config: TrainConfig) -> Any:
    """Return ``class Policy(ConfiguredPolicy, <model class of the folder>)``."""
    return type("Policy", (ConfiguredPolicy, model_class(Path(config.model))), {"trained_by": config})


def rate_factor(config: TrainConfig, update: int) -> float:
    """Return the share of the learning rate at an optimizer step, from 0."""
    own = config.algorithm
    if update < own.warmup_steps:
        return (update + 1) / (own.warmup_steps + 1)
    left = max(1, config.steps * own.minibatches - own.warmup_steps)
    done = min(1.0, (update - own.warmup_steps) / left)
    return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[own.schedule]


def has_different_rewards(trajectories: list[Trajectory]) -> bool:
    """Return True if a group has an advantage: not all rewards are equal."""
    return len({one.reward for one in trajectories}) > 1


def _of_episodes(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean reward and the staleness of a batch."""
    rewards = [reward for one in records for reward in one["rewards"]]
    staleness = [one["staleness"] for one in records]
    return {
        "reward": sum(rewards) / len(rewards),
        "staleness": sum(staleness) / len(staleness),
        "staleness_max": max(staleness),
    }
