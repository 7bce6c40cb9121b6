"""``StrategyBase``: the methods that LightRFT's programs call, over rlcore's engines, on every rank alike (SPMD)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import rlcore
from rlcore.collectives.default_group import all_gather_bytes
from rlcore.compat.lightrft.actor import ActorLanguage
from rlcore.compat.lightrft.configuration import StrategyConfig
from rlcore.compat.lightrft.dataloader import ResumingSampler
from rlcore.compat.lightrft.generation import (
    EngineStatus,
    GeneratedSequence,
    prompts_of,
    sampling_params_of,
    token_lists,
)
from rlcore.compat.lightrft.spmd_program import SpmdProgram
from rlcore.engines.checkpoints.manifest import committed
from rlcore.errors import CheckpointError, StateError, UnsupportedError

T = TypeVar("T")


class StrategyBase(SpmdProgram):
    """How models train, generate and move between device and host; the same program runs on each rank of torchrun.

    Model folders are ``args.pretrain``.
    """

    executor: ClassVar[str]
    """The train executor."""

    def __init__(
        self,
        seed: int = 42,
        max_norm: float = 1.0,
        micro_train_batch_size: int = 1,
        train_batch_size: int = 1,
        args: Any = None,
    ) -> None:
        self.seed, self.max_norm, self.args = seed, max_norm, args
        self.micro_train_batch_size, self.train_batch_size = micro_train_batch_size, train_batch_size
        self.config = StrategyConfig() if args is None else StrategyConfig.from_args(args)
        self.config.micro_train_batch_size, self.config.train_batch_size = micro_train_batch_size, train_batch_size
        self.inference_engine: rlcore.InferenceEngine | None = None
        self.inference_engine_status = EngineStatus.SLEEPED
        self._actors: list[ActorLanguage] = []
        self._num_accumulated: dict[int, int] = {}
        """Micro-batches of the step that is under way, by the actor's id."""
        self.setup_distributed(timeout=timedelta(minutes=60))
        self.accumulated_gradient = self.config.accumulated_gradient(self.world_size)

    def setup_distributed(self, timeout: timedelta | None = None, num_gpu_per_node: int = 8) -> None:
        super().setup_distributed(timeout, num_gpu_per_node)
        if self.config.sp_size > 1:
            raise UnsupportedError(f"sp_size={self.config.sp_size}", "use TrainEngine.build(sequence_parallel_size=)")
        if self.config.engine_tp_size not in (1, self.world_size):
            raise UnsupportedError(
                f"engine_tp_size={self.config.engine_tp_size} of {self.world_size} ranks",
                "1 (an engine on each rank) and the number of ranks (one engine of all) are",
            )

    # ------------------------------------------------------------------------------------------- the models

    @contextlib.contextmanager
    def init_model_context(self, meta_init: bool = False) -> Iterator[None]:
        """Do nothing: an actor is always made on the meta device, and reads its weights when it is prepared."""
        yield

    def unwrap_model(self, model: Any) -> Any:
        return model.model if isinstance(model, ActorLanguage) else getattr(model, "module", model)

    def prepare_model(
        self, model: Any, is_training: bool = False, shard_size: int | str = -1, reshard_after_forward: bool = True
    ) -> Any:
        """Shard an actor over all ranks, with an optimizer if it is to be trained; put another module on the device.

        Args:
            shard_size: not used: a model that does not train is sharded over all ranks as well.
        """
        if isinstance(model, ActorLanguage):
            if not model.is_prepared:
                settings = {
                    "lr": self.config.actor_learning_rate,
                    "betas": tuple(self.config.adam_betas),
                    "weight_decay": self.config.l2,
                }
                model.build(self.executor, settings if is_training else None, **self._build_options())
                self._actors.append(model)
            return model
        if is_training and model is not None:
            raise UnsupportedError(
                f"to train a {type(model).__name__} by this strategy",
                "rlcore.compat.lightrft.ActorLanguage is; examples/algorithms/ppo.py trains a critic",
            )
        return model.to(self.device.torch_device) if isinstance(model, nn.Module) else model

    def _build_options(self) -> dict[str, Any]:
        return {
            "data_parallel_size": self.world_size,
            "devices": self._devices(),
            "launcher": "torchrun" if self.is_torchrun else "inline",
            "compute_dtype": "bfloat16" if self.config.bf16 else "float32",
        } | self.config.train_options

    def _devices(self) -> list[str]:
        """Return the devices of this host's ranks."""
        kind = self.device.name.partition(":")[0]
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        return [f"{kind}:{index}" for index in range(here)]

    def create_optimizer(self, model: Any, **kwargs: Any) -> Optimizer:
        """Return the actor's AdamW, with these settings (``lr``, ``betas``, ``weight_decay``, ``eps``)."""
        actor = self.prepare_model(model, is_training=True)
        if (optimizer := getattr(actor.model, "optimizer", None)) is None:
            raise StateError("the model was prepared without an optimizer; call prepare_model(model, is_training=True)")
        actor.model.set_optimizer(**kwargs)
        return optimizer  # type: ignore[no-any-return]

    def prepare(self, *models_or_model_optim_pairs: Any, is_rlhf: bool = False) -> Any:
        """Prepare models, and triples of model, optimizer and scheduler; return them in their order."""
        found: list[Any] = []
        for one in models_or_model_optim_pairs:
            if isinstance(one, tuple) and len(one) == 3 and not isinstance(one[1], nn.Module):
                found.append((self.prepare_model(one[0], is_training=True), *one[1:]))
            elif isinstance(one, list | tuple):
                found.append([self.prepare_model(model) for model in one])
            else:
                found.append(self.prepare_model(one))
        return found[0] if len(found) == 1 else found

    def prepare_models_and_optimizers(  # noqa: PLR0917 (as in LightRFT)
        self, actor: Any, critic: Any, reward_models: Any, initial_model: Any, args: Any, max_steps: int
    ) -> tuple[Any, ...]:
        """Return ``(actor, optimizer, scheduler)``, ``(None, None, None)`` for the critic, reward models, reference."""
        if critic is not None:
            raise UnsupportedError("a critic", "examples/algorithms/ppo.py trains one as a method of a TrainEngine")
        self.prepare_model(actor, is_training=True)
        optimizer = self.create_optimizer(actor)
        num_warmup = math.ceil(max_steps * self.config.lr_warmup_ratio)
        actor.model.set_schedule(num_warmup, max_steps)
        self.sync_and_clear_cache()
        triple = (actor, optimizer, actor.model.scheduler)
        return triple, (None, None, None), self.prepare(reward_models), self.prepare(initial_model)

    # ----------------------------------------------------------------------------------------- the training

    def backward(self, loss: Tensor, model: Any, optimizer: Optimizer, **kwargs: Any) -> None:
        """Add the gradients of a micro-batch's loss. Those of a step are the mean over micro-batches and ranks."""
        actor = self._actor_of(model)
        is_last = self._num_accumulated.get(id(actor), 0) == self.accumulated_gradient - 1
        actor.backward(loss / (self.accumulated_gradient * self.world_size), is_last=is_last)

    def optimizer_step(
        self, optimizer: Optimizer, model: Any, scheduler: LRScheduler | None, name: str = "model", **kwargs: Any
    ) -> None:
        """Count a micro-batch; after the last of a step clip, step and drop the gradients."""
        actor = self._actor_of(model)
        count = (self._num_accumulated.get(id(actor), 0) + 1) % self.accumulated_gradient
        self._num_accumulated[id(actor)] = count
        if count:
            return
        norm = actor.step(self.max_norm or None)
        if not math.isfinite(norm):
            self.print(f"the gradient norm of {name} is {norm}: the step is left out")
        elif scheduler is not None:
            scheduler.step()

    def setup_dataloader(  # noqa: PLR0917 (as in LightRFT)
        self,
        replay_buffer: Any,
        batch_size: int,
        pin_memory: bool = False,
        shuffle: bool = True,
        collate_fn: Callable[..., Any] | None = None,
        drop_last: bool = True,
        sampler: Any = None,
        consumed_samples: int = 0,
    ) -> DataLoader[Any]:
        """Return a dataloader of this rank's part of the data."""
        sampler = sampler or ResumingSampler(
            replay_buffer,
            consumed_samples=consumed_samples,
            num_replicas=self.world_size,
            rank=self.get_rank(),
            shuffle=shuffle,
            seed=self.seed,
            drop_last=drop_last,
        )
        return DataLoader(
            replay_buffer,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
        )

    def _actor_of(self, model: Any) -> ActorLanguage:
        """Return the prepared actor that is this model, or has it, or whose optimizer it is."""
        for actor in self._actors:
            if model is actor or model is actor.model or model is getattr(actor.model, "optimizer", None):
                return actor
        raise StateError(f"this {type(model).__name__} is not prepared; call strategy.prepare_model(actor)")

    # -------------------------------------------------------------------------------------------- the memory

    def offload_model(self, models: Any, empty_cache: bool = True) -> None:
        """Move the weights of models to host memory."""
        for model in models if isinstance(models, list | tuple) else [models]:
            if isinstance(model, ActorLanguage):
                model.engine.offload("weights")
            elif isinstance(model, nn.Module):
                model.to("cpu")
        if empty_cache:
            self.sync_and_clear_cache()

    def reload_model(self, models: Any) -> None:
        """Move the weights of models back to the device."""
        for model in models if isinstance(models, list | tuple) else [models]:
            if isinstance(model, ActorLanguage):
                model.engine.onload("weights")
            elif isinstance(model, nn.Module):
                model.to(self.device.torch_device)

    def maybe_offload_optimizer(self, optimizer: Optimizer) -> None:
        """Move the optimizer's states to host memory, with ``args.adam_offload``."""
        if self.config.adam_offload:
            self._actor_of(optimizer).engine.offload("optimizer")

    def maybe_load_optimizer(self, optimizer: Optimizer, device: Any = None) -> None:
        """Move the optimizer's states back to the device, with ``args.adam_offload``."""
        if self.config.adam_offload:
            self._actor_of(optimizer).engine.onload("optimizer")

    # ---------------------------------------------------------------------------------------- the generation

    def setup_inference_engine(
        self, args: Any, engine_type: str = "vllm", actor: ActorLanguage | None = None
    ) -> rlcore.InferenceEngine:
        """Build the inference engine of ``args.pretrain`` on the devices of the trainer; it has the actor's weights.

        Args:
            engine_type: an inference executor of rlcore, such as "vllm" or "hf".
        """
        if self.inference_engine is not None:
            raise StateError("there is an inference engine already; a strategy has one until close()")
        options: dict[str, Any] = {"dtype": "bfloat16" if self.config.bf16 else "float32"}
        if engine_type == "vllm" and self.config.engine_mem_util is not None:
            options["gpu_memory_utilization"] = self.config.engine_mem_util
        whole = self.config.engine_tp_size > 1
        self.inference_engine = rlcore.InferenceEngine(args.pretrain, executor=engine_type).build(
            devices=self._devices() if whole else self._devices()[:1],
            tensor_parallel_size=self.config.engine_tp_size,
            launcher="torchrun" if self.is_torchrun else "inline",
            **options | self.config.engine_options,
        )
        self.inference_engine_status = EngineStatus.WAKEUP
        if actor is not None:
            self.update_engine_weights(actor)
        self.maybe_sleep_inference_engine()
        return self.inference_engine

    def maybe_sleep_inference_engine(self) -> None:
        """Free the engine's device memory, with ``args.enable_engine_sleep``."""
        if self.inference_engine is None or not self.config.enable_engine_sleep:
            return
        if self.inference_engine_status is EngineStatus.WAKEUP:
            self.inference_engine.meta("kv_cache")
            self.inference_engine.offload("weights")
            self.inference_engine_status = EngineStatus.SLEEPED
            self.sync_and_clear_cache()

    def wakeup_inference_engine(self) -> None:
        """Bring the engine back to the device."""
        if self.inference_engine is not None and self.inference_engine_status is EngineStatus.SLEEPED:
            self.sync_and_clear_cache()
            self.inference_engine.onload()
            self.inference_engine_status = EngineStatus.WAKEUP

    def update_engine_weights(self, actor: ActorLanguage) -> None:
        """Give the actor's weights to the engine, which is awake afterwards."""
        if self.inference_engine is None:
            return
        self.inference_engine.onload("weights")  # the KV cache comes after the sync, which so has its memory
        actor.engine.sync_weights(self.inference_engine)
        self.inference_engine_status = EngineStatus.SLEEPED
        self.wakeup_inference_engine()

    def engine_generate_local(
        self,
        sampling_params: Any,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        multi_modal_inputs: Any = None,
    ) -> list[GeneratedSequence]:
        """Complete each prompt once."""
        if self.inference_engine is None:
            raise StateError("there is no inference engine; call setup_inference_engine() first")
        if multi_modal_inputs is not None or prompt_token_ids is None:
            raise UnsupportedError("generation from images or videos", "token ids are: prompt_token_ids")
        params = sampling_params_of(sampling_params)
        prompts = prompts_of(sampling_params, prompt_token_ids)
        outputs = self.inference_engine.generate(prompts, params, progress=False)
        return [
            GeneratedSequence(list(one.prompt_token_ids), one.outputs[0].token_ids, one.outputs[0].logprobs)
            for one in outputs
        ]

    def gather_and_generate(  # noqa: PLR0917 (as in LightRFT)
        self,
        sampling_params: Any,
        all_prompt_token_ids: Sequence[Sequence[int]] | None = None,
        all_prompts: Any = None,
        all_images: Any = None,
        sleep_engine: bool = True,
        images_num: Any = None,
        all_videos: Any = None,
        videos_num: Any = None,
    ) -> list[GeneratedSequence]:
        """Complete this rank's prompts; ranks that share an engine give it the prompts of all of them together."""
        if any(value is not None for values in (all_images, all_videos) for value in values or ()):
            raise UnsupportedError("generation from images or videos", "token ids are: all_prompt_token_ids")
        if all_prompt_token_ids is None and all_prompts:
            raise UnsupportedError("generation from texts alone", "token ids are: all_prompt_token_ids")
        self.wakeup_inference_engine()
        own, rank = token_lists([] if all_prompt_token_ids is None else all_prompt_token_ids), self.get_rank()
        parts = [own]
        if self.config.engine_tp_size > 1:
            parts = [json.loads(one) for one in all_gather_bytes(json.dumps(own).encode(), self.device.torch_device)]
        outputs = self.engine_generate_local(sampling_params, [one for part in parts for one in part])
        start = sum(map(len, parts[:rank])) if len(parts) > 1 else 0
        if sleep_engine:
            self.maybe_sleep_inference_engine()
        return outputs[start : start + len(own)]

    # ---------------------------------------------------------------------------------------- the checkpoints

    def save_ckpt(  # noqa: PLR0917 (as in LightRFT)
        self,
        model: Any,
        save_dir: str,
        tag: str | None = None,
        max_num: int = 3,
        max_mem: int = 1000,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        optimizer: Any = None,
        scheduler: Any = None,
    ) -> None:
        """Write a checkpoint of rlcore, with the optimizer, the scheduler and ``client_state`` (plain values).

        Args:
            tag: the folder's name in ``save_dir``.
            max_num: the most checkpoints that are kept there; the oldest go.
        """
        folder = Path(save_dir)
        self._actor_of(model).engine.save(folder / (tag or "checkpoint"), dict(client_state or {}))
        if self.is_rank_0():
            for old in _checkpoints_of(folder)[: -max(max_num, 1)]:
                shutil.rmtree(old)
        self.sync_and_clear_cache()

    def load_ckpt(  # noqa: PLR0917 (as in LightRFT)
        self,
        model: Any,
        load_dir: str,
        tag: str | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        """Continue from a checkpoint, the newest without ``tag``; return its folder and the ``client_state``."""
        if not (load_module_strict and load_optimizer_states and load_lr_scheduler_states) or load_module_only:
            raise UnsupportedError("load_ckpt() of a part", "a checkpoint is loaded whole; pretrain takes an export")
        found = [Path(load_dir, tag)] if tag else _checkpoints_of(Path(load_dir))
        if not found or not found[-1].is_dir():
            raise CheckpointError(f"no checkpoint in {load_dir}" + (f" has the name {tag!r}" if tag else ""))
        return str(found[-1]), self._actor_of(model).engine.load(found[-1])

    def save_model(self, model: Any, tokenizer: Any, output_dir: str, **kwargs: Any) -> None:
        """Write a Hugging Face model folder, with the tokenizer's files of the folder that the actor came from."""
        self._actor_of(model).engine.export(output_dir)
        self.sync_and_clear_cache()

    def close(self) -> None:
        """End all engines; LightRFT's programs leave that to the end of the process."""
        for engine in (self.inference_engine, *(actor.engine for actor in self._actors)):
            if engine is not None:
                engine.close()
        self.inference_engine = None


def _checkpoints_of(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the oldest first. Other folders there are not ours to load or to remove."""
    if not folder.is_dir():
        return []
    found = [one for one in folder.iterdir() if one.is_dir() and committed(one)]
    return sorted(found, key=lambda one: one.stat().st_mtime_ns)
