"""The parts of a step of reinforcement learning through the engines, and the whole step by phase.

The step is colocated: trainer and sampler take turns on one device. Its bubble is the share of the step in which the
device neither samples nor scores nor trains: switching, syncing, judging, and what lies between.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.agreement import WORST, tolerance
from rlcore.bench.cases.models import Folder, Load, learner, load_on
from rlcore.bench.cases.timing import Measured, PhaseTimes, self_timed, timed
from rlcore.device import Device
from rlcore.engines.batch import collate
from rlcore.engines.inference import InferenceEngine
from rlcore.engines.train import TrainEngine
from rlcore.kernels.losses.policy import ppo_clip
from rlcore.kernels.returns.group_advantage import group_advantage
from rlcore.tensor_data import dtype_name

PHASES = ("generate", "reward", "old_logprob", "update", "sync", "switch")
_USEFUL = ("generate", "old_logprob", "update")


def _prepare_train_step(device: Device) -> Work:
    load = load_on(device)
    held = contextlib.ExitStack()
    folder = held.enter_context(contextlib.closing(Folder(load.model, load.dtype, device)))
    train = held.enter_context(TrainEngine(learner(folder.path)))
    train.build(devices=device.name, compute_dtype=dtype_name(load.dtype))
    batch = load.train_batch()
    num_tokens = int(batch["attention_mask"].sum())
    contender = Contender(
        "fsdp2",
        lambda: train.train_batch(batch, ppo_clip(clip_low=0.2, clip_high=0.28)),
        check_trained,
        # Six operations a parameter and token, recomputation and attention not counted.
        limits={f"product/{load.params['dtype']}": 6 * load.model.num_multiplied * num_tokens},
    )
    return Work((contender,), {**load.params, "tokens": num_tokens, "devices": 1}, close=held.close)


def check_trained(metrics: Mapping[str, float]) -> None:
    """Raise AssertionError unless a step of training has trained."""
    expect(all(map(math.isfinite, metrics.values())), f"not finite: {metrics}")
    expect(metrics["grad_norm"] > 0, "there was no gradient")


def _prepare_rollout(device: Device) -> Work:
    load = load_on(device)
    held = contextlib.ExitStack()
    folder = held.enter_context(contextlib.closing(Folder(load.model, load.dtype, device)))
    infer = held.enter_context(InferenceEngine(folder.path).build(devices=device.name))
    asked, options = load.prompt_ids(), _sampling(load)
    wanted = sum(load.lengths()) * load.samples

    def check(done: tuple[list[Any], float]) -> None:
        found = sum(len(answer.token_ids) for output in done[0] for answer in output.outputs)
        expect(found == wanted, f"{found} tokens were sampled, not {wanted}")

    contender = Contender(
        "hf",
        lambda: timed(lambda: infer.generate(asked, options, progress=False)),
        check,
        quantities=lambda done: {"new_tokens": Quantity(wanted / done[1], "token/s")},
    )
    return Work((contender,), {**load.params, "devices": 1}, close=held.close)


def _sampling(load: Load, seed: int = 0) -> list[dict[str, Any]]:
    """Return the options of each prompt; lengths are fixed, so that every run samples as many tokens."""
    return [{"n": load.samples, "max_tokens": n, "ignore_eos": True, "seed": seed} for n in load.lengths()]


# ----------------------------------------------------------------------------------------------------- a step


class _Loop:
    """Trainer and sampler on one device."""

    def __init__(self, device: Device, load: Load) -> None:
        self.device, self.load = device, load
        self.folder = Folder(load.model, load.dtype, device)
        self.train, self.infer = TrainEngine(learner(self.folder.path)), InferenceEngine(self.folder.path)
        self.train.build(devices=device.name, compute_dtype=dtype_name(load.dtype), onload=False)
        self.infer.build(colocate_with=self.train, dtype=dtype_name(load.dtype))
        self._number = 0

    def close(self) -> None:
        self.train.close()
        self.infer.close()
        self.folder.close()

    def step(self) -> Measured:
        self._number += 1
        times = PhaseTimes(self.device, PHASES)
        started = time.perf_counter()
        with times.phase("generate"):
            outputs = self.infer.generate(self.load.prompt_ids(), _sampling(self.load, self._number), progress=False)
        with times.phase("reward"):
            batch = collate(outputs, advantages=group_advantage(_rewards(outputs)))
        with times.phase("switch"):
            self.infer.meta()
            self.train.onload()
        with times.phase("old_logprob"):
            logprobs = self.train.forward_logprobs(batch)
        with times.phase("update"):
            self.train.train_batch(batch, ppo_clip(clip_low=0.2, clip_high=0.28))
        with times.phase("switch"):
            self.train.offload("optimizer", "grads")
            self.infer.onload("weights")
        with times.phase("sync"):
            self.train.sync_weights(self.infer)
        with times.phase("switch"):
            self.train.offload()
            self.infer.onload("kv_cache")
        seconds = time.perf_counter() - started
        sampled_S = batch["old_logprobs"][batch["loss_mask"]]
        parity = float((logprobs[batch["loss_mask"]] - sampled_S).abs().max() / sampled_S.std())
        num_tokens = len(sampled_S)
        quantities = {
            **{name: Quantity(spent, "s") for name, spent in times.seconds.items()},
            "bubble": Quantity(1 - sum(times.seconds[name] for name in _USEFUL) / seconds, "1"),
            "trained_tokens": Quantity(num_tokens / seconds, "token/s"),
            "new_tokens": Quantity(num_tokens / times.seconds["generate"], "token/s"),
        }
        return Measured(parity, seconds, quantities)


def _rewards(outputs: list[Any]) -> Tensor:
    """Return the share of even tokens: [prompts, samples]."""
    shares = [[sum(t % 2 == 0 for t in a.token_ids) / len(a.token_ids) for a in o.outputs] for o in outputs]
    return torch.tensor(shares)


def _prepare_step(device: Device) -> Work:
    load = load_on(device)
    loop = _Loop(device, load)
    limit = WORST * tolerance(load.model, load.dtype, load.prompt_tokens + load.new_tokens).state

    def check(parity: float) -> None:
        """``parity``: the greatest difference of log-probs between sampler and trainer, of what these spread."""
        expect(0 < parity <= limit, f"log-probs of sampler and trainer differ by {parity:.1e}, more than {limit:.1e}")

    contender = self_timed("fsdp2+hf", loop.step, check)
    return Work((contender,), {**load.params, "devices": 1}, close=loop.close)


cases = (
    Case(
        "train/step",
        "one optimizer step of a Qwen2 on uneven completions, through the train engine",
        _prepare_train_step,
        estimate_s=3.0,
        device_estimate_s=25.0,
    ),
    Case(
        "rollout/hf",
        "sampling completions of uneven lengths, through the inference engine",
        _prepare_rollout,
        estimate_s=6.0,
    ),
    Case(
        "rl/step",
        "a step with trainer and sampler on one device, by phase, and the share that is neither",
        _prepare_step,
        effort="quick",
        estimate_s=4.0,
        device_estimate_s=72.0,
    ),
)
