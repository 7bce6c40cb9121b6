"""The two sides of the race, each a program: it takes a load as JSON and the path of the file for its times."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlcore.atomic import write_file
from rlcore.bench.cases.models import LEARNING_RATE, learner
from rlcore.bench.cases.peers.race import PHASES, RaceLoad
from rlcore.bench.cases.timing import PeakWatch, PhaseTimes
from rlcore.device import Device
from rlcore.engines.batch import collate
from rlcore.engines.inference import InferenceEngine
from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.train import TrainEngine
from rlcore.kernels.losses.importance import tis
from rlcore.kernels.losses.on_policy import on_policy
from rlcore.kernels.losses.policy import ppo_clip
from rlcore.kernels.returns.group_advantage import group_advantage
from rlcore.registry import get_device, resolve

_CLIP_LOW, _CLIP_HIGH = 0.2, 0.28
_IMPORTANCE_CAP = 3.0
"""The highest weight of a token for the difference between sampler and trainer."""
_POLL_S = 0.1  # more often, it would keep the interpreter from vLLM's loop
_NUM_SPECIAL = 2


class Stopwatch:
    """Seconds of each step and of the phases in it, and the most device memory that anybody used meanwhile."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.steps: list[float] = []
        self.phases: dict[str, list[float]] = {name: [] for name in PHASES}
        self._memory = PeakWatch(self._used_bytes, _POLL_S)
        self.begin()

    def _used_bytes(self) -> int:
        memory = self._device.memory.info()
        return memory.total_bytes - memory.free_bytes

    def begin(self) -> None:
        self._device.synchronize()
        self._times = PhaseTimes(self._device, PHASES)
        self.phase = self._times.phase
        self._started = time.perf_counter()

    def end(self) -> None:
        self._device.synchronize()
        seconds = time.perf_counter() - self._started
        spent_in = self._times.seconds
        spent_in["rest"] = seconds - sum(spent_in.values())
        self.steps.append(seconds)
        for name, spent in spent_in.items():
            self.phases[name].append(spent)

    def write(self, path: Path, parity: float) -> None:
        """Write the times of all steps but the first, which compiles and allocates."""
        times = {
            "seconds": self.steps[1:],
            "phases": {name: spent[1:] for name, spent in self.phases.items()},
            "peak_bytes": self._memory.end(),
            "parity": parity,
        }
        write_file(path, json.dumps(times).encode())


def _reward(text: str) -> float:
    """Return the share of even tokens: the text of a token is its number, or the name of a special one."""
    words = text.split()
    return sum(word.isdigit() and int(word) % 2 == 0 for word in words) / max(1, len(words))


def _tokenizer(load: RaceLoad) -> Any:
    """Return a tokenizer to which the text of a token is its number, and write it beside the model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {str(number): number for number in range(_NUM_SPECIAL, load.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(load.folder)
    return fast


def _prompts(load: RaceLoad) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    found: list[list[int]] = torch.randint(
        _NUM_SPECIAL, load.vocabulary, (load.prompts, load.prompt_tokens), generator=generator
    ).tolist()
    return found


# ------------------------------------------------------------------------------------------------------- rlcore


def rlcore_side(load_json: str, result: str) -> None:
    """Make the steps with rlcore's engines: compiled blocks, bfloat16 computation, float32 weights and Adam."""
    load = RaceLoad(**json.loads(load_json))
    watch, loop = Stopwatch(get_device(load.device)), RlcoreLoop(load)
    for _ in range(load.steps):
        watch.begin()
        loop.step(watch)
        watch.end()
    watch.write(Path(result), loop.parity())
    loop.close()


class RlcoreLoop:
    """Trainer and vLLM on one device, and the steps that they make in turn."""

    def __init__(self, load: RaceLoad) -> None:
        self._load = load
        is_host = get_device(load.device).spec.is_host
        self._tokenizer = _tokenizer(load)
        self.train = TrainEngine(learner(load.folder, weight_decay=0.0, fused=True))
        self.infer = InferenceEngine(load.folder, executor="vllm")
        self.train.build(
            devices=load.device,
            dtype="float32",
            compute_dtype="float32" if is_host else "bfloat16",
            activation_checkpointing="selective" if load.recomputes else False,
            compile=not is_host,
            onload=not load.offloads,
        )
        self.infer.build(
            colocate_with=self.train,
            dtype="float32" if is_host else "bfloat16",
            max_model_len=load.max_length,
            max_num_seqs=load.prompts * load.samples,
            kv_cache_memory_bytes=load.kv_cache_bytes,
            enforce_eager=is_host,
        )

    def step(self, watch: Stopwatch) -> None:
        with watch.phase("generate"):
            outputs = self._sampled(_prompts(self._load))
        texts = [self._tokenizer.batch_decode([answer.token_ids for answer in output.outputs]) for output in outputs]
        rewards = torch.tensor([[_reward(text) for text in answers] for answers in texts])
        batch = collate(outputs, advantages=group_advantage(rewards))
        batch["rollout_logprobs"] = batch.pop("old_logprobs")
        self.infer.meta()
        self.train.onload()
        # One optimizer step a batch: the old policy is the one that is trained, and needs no pass of its own.
        loss = on_policy(tis(ppo_clip(clip_low=_CLIP_LOW, clip_high=_CLIP_HIGH), cap=_IMPORTANCE_CAP))
        self.train.train_batch(batch, loss, max_tokens_per_micro_batch=self._most_tokens())
        if self._load.offloads:
            self.train.offload("optimizer", "grads")
        elif self._load.recomputes:
            self.train.meta("grads")  # vLLM gets the room that they had
        self.infer.onload("weights")
        with watch.phase("sync"):
            self.train.sync_weights(self.infer)
        if self._load.offloads:
            self.train.offload()
        self.infer.onload("kv_cache")

    def parity(self) -> float:
        """Return the mean difference of log-probs, in nats a token, of vLLM and the trainer after the last sync."""
        batch = collate(self._sampled(_prompts(self._load)[:1]))
        self.train.onload()
        scored = self.train.forward_logprobs(batch, max_tokens_per_micro_batch=self._most_tokens())
        return float((scored - batch["old_logprobs"]).abs()[batch["loss_mask"]].mean())

    def close(self) -> None:
        self.train.close()
        self.infer.close()

    def _sampled(self, prompts: list[list[int]]) -> list[RequestOutput]:
        options = {"n": self._load.samples, "max_tokens": self._load.new_tokens, "ignore_eos": True}
        return self.infer.generate(prompts, options, progress=False)

    def _most_tokens(self) -> int:
        return self._load.sequences_at_once * self._load.max_length


# ---------------------------------------------------------------------------------------------------------- TRL


def trl_side(load_json: str, result: str) -> None:
    """Make the steps with TRL: colocated vLLM that sleeps, Liger's layers, bfloat16 autocast, fused AdamW."""
    _run_trl(load_json, result, lambda trainer, load: None)


def adopted_side(load_json: str, result: str) -> None:
    """Make the steps with the same trainer of TRL after ``accelerate_trl``."""
    # By its path, as in a registration: no module of bench/ imports what lies above it.
    accelerate_trl = resolve("rlcore.integrations.trl:accelerate_trl")
    _run_trl(load_json, result, lambda trainer, load: accelerate_trl(trainer, offload_optimizer=load.offloads))


def _run_trl(load_json: str, result: str, adopt: Callable[[Any, RaceLoad], object]) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    load = RaceLoad(**json.loads(load_json))
    device = get_device(load.device)
    is_host = device.spec.is_host
    watch, tokenizer = Stopwatch(device), _tokenizer(load)

    class Timed(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            watch.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.end()

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [_reward(completion) for completion in completions]

    sequences = load.prompts * load.samples
    arguments = GRPOConfig(
        output_dir=str(Path(result).parent / "trl"),
        max_steps=load.steps,
        per_device_train_batch_size=load.sequences_at_once,
        gradient_accumulation_steps=sequences // load.sequences_at_once,
        num_generations=load.samples,
        max_completion_length=load.new_tokens,
        generation_kwargs={"ignore_eos": True},
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        epsilon=_CLIP_LOW,
        epsilon_high=_CLIP_HIGH,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=_IMPORTANCE_CAP,
        gradient_checkpointing=load.recomputes,
        bf16=not is_host,
        use_cpu=is_host,
        use_liger_kernel=not is_host,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=not is_host,
        vllm_gpu_memory_utilization=_utilization(load, device),
        vllm_max_model_length=load.max_length,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
    )
    prompts = [" ".join(map(str, prompt)) for prompt in _prompts(load)]
    trainer = GRPOTrainer(
        model=load.folder,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[Timed()],
    )
    adopt(trainer, load)
    _time(trainer.vllm_generation, "sync_weights", watch, "sync")
    _time(trainer.vllm_generation, "generate", watch, "generate")
    _time(trainer, "_get_per_token_logps_and_entropies", watch, "old_logprob", when=lambda: not torch.is_grad_enabled())
    trainer.train()
    differences = [line["sampling/sampling_logp_difference/mean"] for line in trainer.state.log_history[:-1]]
    watch.write(Path(result), differences[-1])


def _utilization(load: RaceLoad, device: Device) -> float:
    """Return vLLM's share of the device: weights in bfloat16, the cache, and a rest for what its kernels need."""
    weights = sum(file.stat().st_size for file in Path(load.folder).glob("*.safetensors"))
    return (1.3 * weights + load.kv_cache_bytes + (4 << 30)) / device.memory.info().total_bytes


def _time(owner: Any, method: str, watch: Stopwatch, phase: str, *, when: Callable[[], bool] = lambda: True) -> None:
    """Replace a method by one that is timed as a phase, in the calls for which ``when`` holds."""
    original = getattr(owner, method)

    def timed(*arguments: Any, **options: Any) -> Any:
        with watch.phase(phase) if when() else contextlib.nullcontext():
            return original(*arguments, **options)

    setattr(owner, method, timed)
