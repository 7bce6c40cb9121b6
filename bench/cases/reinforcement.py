"""The parts of a step of reinforcement learning through the engines, and the whole step by phase.

The step is colocated: trainer and sampler take turns on one device. Its bubble is the share of the step in which the
device neither samples nor scores nor trains: switching, syncing, judging, and what lies between.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.language_model import Folder, Size, config, lengths, prompts, size_on, train_batch
from rlcore.device import Device
from rlcore.engines.batch import collate
from rlcore.engines.inference import InferenceEngine
from rlcore.engines.train import TrainEngine
from rlcore.kernels.losses.policy import ppo_clip
from rlcore.kernels.returns.group_advantage import group_advantage
from rlcore.meta import meta_device
from rlcore.nn import HuggingFaceTrainModule
from rlcore.tensor_data import dtype_name

PHASES = ("generate", "reward", "old_logprob", "update", "sync", "switch")
_USEFUL = ("generate", "old_logprob", "update")
_SYNC_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Nats between sampler and trainer for one token, whose programs round differently."""


def _module(folder: Folder) -> Any:
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):  # type: ignore[misc]
        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-6)

    with meta_device():
        return Policy.from_pretrained(folder.path)


def _num_parameters(size: Size) -> int:
    """That take part in a product for each token: the head does, the embedding does not, and they are one."""
    attention = size.hidden * size.hidden * (2 + 2 * size.kv_heads / size.heads)
    return round(size.layers * (attention + 3 * size.hidden * size.inner) + size.hidden * size.vocabulary)


def _prepare_train_step(device: Device) -> Work:
    size = size_on(device)
    config(size)  # transformers is there
    folder = Folder(size, device)
    train = TrainEngine(_module(folder))
    train.build(devices=device.name)
    batch = train_batch(size)
    num_tokens = int(batch["attention_mask"].sum())

    def check(metrics: Mapping[str, float]) -> None:
        expect(all(torch.isfinite(torch.tensor(value)) for value in metrics.values()), f"not finite: {metrics}")
        expect(metrics["grad_norm"] > 0, "there was no gradient")

    def close() -> None:
        train.close()
        folder.close()

    contender = Contender(
        implementation="fsdp2",
        run=lambda: train.train_batch(batch, ppo_clip(clip_low=0.2, clip_high=0.28)),
        check=check,
        # Six operations a parameter and token, recomputation and attention not counted.
        limits={f"product/{size.params['dtype']}": 6 * _num_parameters(size) * num_tokens},
    )
    return Work(contenders=(contender,), params={**size.params, "tokens": num_tokens, "devices": 1}, close=close)


def _prepare_rollout(device: Device) -> Work:
    size = size_on(device)
    config(size)
    folder = Folder(size, device)
    infer = InferenceEngine(folder.path)
    infer.build(devices=device.name)
    asked, options = prompts(size), _sampling(size)
    wanted = sum(lengths(size)) * size.samples

    def run() -> _Rollout:
        started = time.perf_counter()
        outputs = infer.generate(asked, options, progress=False)
        return _Rollout(outputs, time.perf_counter() - started)

    def check(done: _Rollout) -> None:
        expect(_num_new(done.outputs) == wanted, f"{_num_new(done.outputs)} tokens were sampled, not {wanted}")

    def close() -> None:
        infer.close()
        folder.close()

    contender = Contender(
        implementation="hf",
        run=run,
        check=check,
        quantities=lambda done: {"new_tokens": Quantity(wanted / done.seconds, "token/s")},
    )
    return Work(contenders=(contender,), params={**size.params, "devices": 1}, close=close)


class _Rollout(NamedTuple):
    outputs: list[Any]
    seconds: float


def _sampling(size: Size, seed: int = 0) -> list[dict[str, Any]]:
    """For each prompt; lengths are fixed, so that every run samples as many tokens."""
    return [{"n": size.samples, "max_tokens": n, "ignore_eos": True, "seed": seed} for n in lengths(size)]


def _num_new(outputs: list[Any]) -> int:
    return sum(len(answer.token_ids) for output in outputs for answer in output.outputs)


# ----------------------------------------------------------------------------------------------------- a step


class _Step(NamedTuple):
    seconds: float
    phases: dict[str, float]
    num_tokens: int
    """Sampled, and trained on."""
    parity: float
    """The greatest difference of log-probs, sampler and trainer."""


class _Loop:
    """Trainer and sampler on one device."""

    def __init__(self, device: Device, size: Size) -> None:
        self.device, self.size = device, size
        self.folder = Folder(size, device)
        self.train, self.infer = TrainEngine(_module(self.folder)), InferenceEngine(self.folder.path)
        self.train.build(devices=device.name, onload=False)
        self.infer.build(colocate_with=self.train, dtype=dtype_name(size.dtype))
        self._number = 0

    def close(self) -> None:
        self.train.close()
        self.infer.close()
        self.folder.close()

    def step(self) -> _Step:
        self._number += 1
        self._phases = dict.fromkeys(PHASES, 0.0)
        started = time.perf_counter()
        with self._phase("generate"):
            outputs = self.infer.generate(prompts(self.size), _sampling(self.size, self._number), progress=False)
        with self._phase("reward"):
            batch = collate(outputs, advantages=group_advantage(_rewards(outputs)))
        with self._phase("switch"):
            self.infer.meta()
            self.train.onload()
        with self._phase("old_logprob"):
            logprobs = self.train.forward_logprobs(batch)
        with self._phase("update"):
            self.train.train_batch(batch, ppo_clip(clip_low=0.2, clip_high=0.28))
        with self._phase("switch"):
            self.train.offload("optimizer", "grads")
            self.infer.onload("weights")
        with self._phase("sync"):
            self.train.sync_weights(self.infer)
        with self._phase("switch"):
            self.train.offload()
            self.infer.onload("kv_cache")
        seconds = time.perf_counter() - started
        difference = (logprobs - batch["old_logprobs"]).abs()[batch["loss_mask"]]
        return _Step(seconds, self._phases, int(batch["loss_mask"].sum()), float(difference.max()))

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.device.synchronize()
        self._phases[name] += time.perf_counter() - started


def _rewards(outputs: list[Any]) -> Tensor:
    """How many of the tokens are even: [prompts, samples]."""
    shares = [[sum(t % 2 == 0 for t in a.token_ids) / len(a.token_ids) for a in o.outputs] for o in outputs]
    return torch.tensor(shares)


def _prepare_step(device: Device) -> Work:
    size = size_on(device)
    config(size)
    loop = _Loop(device, size)

    def check(done: _Step) -> None:
        tolerance = _SYNC_TOLERANCE[size.dtype]
        expect(0 < done.parity <= tolerance, f"log-probs of sampler and trainer differ by {done.parity:.1e}")

    def quantities(done: _Step) -> Mapping[str, Quantity]:
        bubble = 1 - sum(done.phases[name] for name in _USEFUL) / done.seconds
        return {
            **{name: Quantity(seconds, "s") for name, seconds in done.phases.items()},
            "bubble": Quantity(bubble, "1"),
            "trained_tokens": Quantity(done.num_tokens / done.seconds, "token/s"),
            "new_tokens": Quantity(done.num_tokens / done.phases["generate"], "token/s"),
        }

    contender = Contender(
        implementation="fsdp2+hf",
        run=loop.step,
        check=check,
        seconds=lambda done: float(done.seconds),
        quantities=quantities,
    )
    return Work(contenders=(contender,), params={**size.params, "devices": 1}, close=loop.close)


train_step_case = Case(
    name="train/step",
    description="one optimizer step of a Qwen2 on uneven completions, through the train engine",
    prepare=_prepare_train_step,
    estimate_s=3.0,
    device_estimate_s=25.0,
)
rollout_case = Case(
    name="rollout/hf",
    description="sampling completions of uneven lengths, through the inference engine",
    prepare=_prepare_rollout,
    estimate_s=6.0,
)
step_case = Case(
    name="rl/step",
    description="a step with trainer and sampler on one device, by phase, and the share that is neither",
    prepare=_prepare_step,
    effort="quick",
    estimate_s=4.0,
    device_estimate_s=72.0,
)
