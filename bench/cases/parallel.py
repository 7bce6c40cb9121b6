"""A step on one long sequence over two devices: the train engine's ways, beside torch's context parallelism.

The plain loop shards the same model by FSDP2 over the same ranks, recomputes the same blocks, and cuts the sequence for
torch's ring attention (``torch.distributed.tensor.experimental.context_parallel``), balanced as that does it. Its loss
is over chunks of rows that are made again in the backward: the logits of all would not fit.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.utils.checkpoint import checkpoint

from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.models import QWEN_0_5B, TINY, ModelShape, packed_batch, transformers_class
from rlcore.bench.cases.models import policy as make_policy
from rlcore.bench.cases.training import sharded
from rlcore.bench.cases.workers import BenchWorker, worker_processes
from rlcore.device import Device
from rlcore.engines.train import TrainEngine
from rlcore.errors import UnsupportedError
from rlcore.kernels.losses.policy import ppo_clip
from rlcore.meta import meta_device

_NUM_DEVICES = 2
_LONGEST = 131_072
_CLIP_LOW, _CLIP_HIGH = 0.2, 0.28
_STEPS = 2
"""After one that warms up."""
_ROWS = 4096
"""Rows of the plain loop's logits at a time."""
_TIMEOUT_S = 600.0
_TOLERANCE = 2e-2
"""Between two losses of bfloat16 models, in nats a token: advantages are of the order of 1."""


class _Job(NamedTuple):
    """The setup that the contenders share."""

    model: ModelShape
    device_type: str
    compute_dtype: torch.dtype
    tokens: int


class _Taken(NamedTuple):
    """The steps of one contender."""

    loss: float
    """The loss of the first step."""
    seconds: list[float]
    peak_bytes: int
    """The peak of the device that held the most."""


def _batch(job: _Job) -> dict[str, Tensor]:
    return packed_batch(job.model.vocabulary, [job.tokens], seed=0)


def _timed(step: Callable[[], float], reset_peak: Callable[[], object]) -> tuple[float, list[float]]:
    loss, seconds = step(), []
    reset_peak()
    for _ in range(_STEPS):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return loss, seconds


def _engine_steps(options: Mapping[str, int], job: _Job) -> _Taken:
    """Take the steps of an engine with these sizes of ``build()``."""
    number = math.prod(options.values())
    engine = TrainEngine(make_policy(job.model, job.compute_dtype, job.device_type))
    engine.build(
        devices=[f"{job.device_type}:{index}" for index in range(number)],
        compute_dtype=str(job.compute_dtype).removeprefix("torch."),
        activation_checkpointing=True,
        timeout_s=_TIMEOUT_S,
        **options,
    )
    batch, loss = _batch(job), ppo_clip(clip_low=_CLIP_LOW, clip_high=_CLIP_HIGH)
    with engine:
        found = _timed(
            lambda: engine.train_batch(batch, loss, max_tokens_per_micro_batch=job.tokens)["loss"],
            lambda: engine.call("reset_peak"),
        )
        return _Taken(*found, max(report["stats"].peak_allocated_bytes for report in engine.memory_report()))


# ----------------------------------------------------------------------------------------------- the plain loop


class _Scored(nn.Module):
    """A causal language model that gives the sum of a policy loss over its rows."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, positions: Tensor, targets: Tensor, per_token: tuple[Tensor, ...]) -> Tensor:
        hidden_TH = self.model.model(input_ids=input_ids, position_ids=positions, use_cache=False).last_hidden_state[0]
        weight = self.model.lm_head.weight
        rows = (hidden_TH, targets[0], *(one[0] for one in per_token))
        chunks = zip(*(one.split(_ROWS) for one in rows), strict=True)
        return torch.stack([checkpoint(_ppo, weight, *chunk, use_reentrant=False) for chunk in chunks]).sum()


def _ppo(  # noqa: PLR0917  # checkpoint passes them on by place
    weight: Tensor, hidden: Tensor, targets: Tensor, old: Tensor, advantage: Tensor, share: Tensor
) -> Tensor:
    logits = nn.functional.linear(hidden, weight).float()
    ratio = (-nn.functional.cross_entropy(logits, targets, reduction="none") - old).exp()
    clipped = ratio.clamp(1 - _CLIP_LOW, 1 + _CLIP_HIGH)
    gain: Tensor = torch.minimum(ratio * advantage, clipped * advantage)
    return -(share * gain).sum()


def _ring_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **_: Any) -> Any:
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return attended.transpose(1, 2), None


class _Ring(BenchWorker):
    """One rank of a loop as torch's tutorial of context parallelism has it, over FSDP2."""

    def run(self, job: _Job) -> _Taken:
        self.context.process_group(_TIMEOUT_S)
        self._mesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("ring",))
        scored, optimizer = self._build(job)
        batch = _batch(job)
        whole = {name: batch[name][None].to(self.device.torch_device) for name in ("input_ids", "old_logprobs")}
        whole["advantages"] = batch["advantages"][None].to(self.device.torch_device)
        whole["share"] = torch.full_like(whole["advantages"], 1 / (job.tokens - 1))
        whole["share"][:, -1] = 0.0  # the last token predicts nothing
        whole["targets"] = whole["input_ids"].roll(-1, 1)
        for name in ("old_logprobs", "advantages"):
            whole[name] = whole[name].roll(-1, 1)
        whole["positions"] = torch.arange(job.tokens, device=self.device.torch_device)[None]

        def step() -> float:
            own = {name: tensor.clone() for name, tensor in whole.items()}
            with context_parallel(self._mesh, buffers=list(own.values()), buffer_seq_dims=[1] * len(own)):
                per_token = own["old_logprobs"], own["advantages"], own["share"]
                loss = scored(own["input_ids"], own["positions"], own["targets"], per_token)
                (loss * dist.get_world_size()).backward()  # FSDP takes the mean
            torch.nn.utils.clip_grad_norm_(scored.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach()
            dist.all_reduce(total)
            return float(total)

        loss, seconds = _timed(step, self.device.memory.reset_peak)
        return _Taken(loss, seconds, self.device.memory.stats().peak_allocated_bytes)

    def _build(self, job: _Job) -> tuple[nn.Module, torch.optim.Optimizer]:
        from transformers import AttentionInterface, AttentionMaskInterface  # an extra

        AttentionInterface.register("rlcore_bench_ring", _ring_attention)
        AttentionMaskInterface.register("rlcore_bench_ring", lambda **_: None)
        with meta_device():
            model = transformers_class("Qwen2ForCausalLM")._from_config(job.model.config())
        model.config._attn_implementation_internal = "rlcore_bench_ring"
        for block in model.model.layers:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return sharded(model, _Scored, job.compute_dtype, self.device, self._mesh)


def _ring_steps(job: _Job) -> _Taken:
    names = [f"{job.device_type}:{index}" for index in range(_NUM_DEVICES)]
    with worker_processes(_Ring, names, _TIMEOUT_S) as group:
        found: list[_Taken] = group.call("run", [((job,), {})] * _NUM_DEVICES)
    return found[0]._replace(peak_bytes=max(one.peak_bytes for one in found))


# --------------------------------------------------------------------------------------------------------- cases


def _prepare(tokens: int, device: Device) -> Work:
    is_host = device.spec.is_host
    if not is_host and device.count() < _NUM_DEVICES:
        raise UnsupportedError(f"this case on {device.count()} {device.spec.name}", "it compares ways to use two")
    model = TINY if is_host else QWEN_0_5B
    dtype = torch.float32 if is_host else torch.bfloat16
    job = _Job(model, device.spec.name, dtype, tokens // 128 if is_host else tokens)
    job.model.config()  # transformers is there
    losses: list[float] = []

    def contender(name: str, run: Callable[[_Job], _Taken], num_devices: int = _NUM_DEVICES) -> Contender:
        def run_alone() -> _Taken:
            gc.collect()
            device.memory.empty_cache()
            return run(job)

        def check(done: _Taken) -> None:
            losses.append(done.loss)
            expect(abs(done.loss - losses[0]) <= _TOLERANCE, f"the loss is {done.loss}, and elsewhere {losses[0]}")

        return Contender(
            name,
            run_alone,
            check,
            seconds=lambda done: done.seconds,
            quantities=lambda done: {} if is_host else {"peak_memory": Quantity(done.peak_bytes, "B")},
            params={"devices": num_devices},
        )

    def engine(name: str, **options: int) -> Contender:
        return contender(name, functools.partial(_engine_steps, options), math.prod(options.values()))

    contenders = [engine("engine, Ulysses", sequence_parallel_size=_NUM_DEVICES)]
    if not is_host:  # torch's ring attention has no kernel of a host
        contenders.append(contender("torch context parallel", _ring_steps))
    if tokens < _LONGEST:
        contenders += [
            engine("engine, tensor parallel", tensor_parallel_size=_NUM_DEVICES),
            engine("engine on one device"),
        ]
    params: dict[str, int | float | str] = {
        "model": model.name,
        "tokens": job.tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "recompute": "True",
    }
    return Work(tuple(contenders), params, num_runs=1)


cases = tuple(
    Case(
        f"train/long_sequence_{tokens // 1024}k",
        f"a step on one sequence of {tokens // 1024}k tokens over two devices, beside torch's context parallelism",
        functools.partial(_prepare, tokens),
        effort="full",
        estimate_s=60.0,
    )
    for tokens in (32_768, _LONGEST)
)
