"""A step of the train engine beside a plain loop of torch's FSDP2, and packed lengths that differ beside equal ones.

Both train the same model from the same weights on the same tokens, with the same packed attention, compiled blocks,
recomputation and fused AdamW. The plain loop makes the logits of every token and compiles the loss over them, and its
compiler chooses by itself what blocks keep for their backward; the engine tells its own (``block_compiler``). Where
there are several devices the engine also runs on one, to show what each of several loses. Each contender is built,
warmed up, timed and closed before the next, so that each has the devices to itself.
"""

from __future__ import annotations

import functools
import gc
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.models import QWEN_1_5B, QWEN_7B, TINY, Drawn, ModelShape, packed_batch, transformers_class
from rlcore.bench.cases.models import policy as make_policy
from rlcore.bench.cases.workers import BenchWorker
from rlcore.device import Device
from rlcore.engines.launchers.launch import choose_launcher, start_workers
from rlcore.engines.train import TrainEngine
from rlcore.errors import UnsupportedError
from rlcore.kernels.losses.policy import ppo_clip
from rlcore.meta import meta_device

_TOKENS, _HOST_TOKENS = 8192, 256
"""Tokens of each device and step."""
_PER_DEVICE = 8
"""Sequences of equal length."""
_UNEVEN = (
    (4096, 2048, 1024, 512, 256, 128, 64, 64),
    (3072, 2048, 1536, 768, 384, 192, 128, 64),
    (4096, 1024, 1024, 1024, 512, 256, 128, 64, 64),
)
"""Lengths that come to as many tokens; those on a host are a part of them."""
_CLIP_LOW, _CLIP_HIGH = 0.2, 0.28
_WARM_UP, _STEPS = 3, 6
_TIMEOUT_S = 600.0
_TOLERANCE = 2e-2
"""Between two losses of bfloat16 models, in nats a token: advantages are of the order of 1."""
_FLOAT8_TOLERANCE = 1e-1
"""Where one of them multiplies in float8, whose mantissa has three bits and not seven."""


class _Steps(NamedTuple):
    """The steps of one contender."""

    loss: float
    """The loss of the first step."""
    seconds: list[float]
    """The seconds of each step after those that warm up."""
    first_s: float
    """The seconds of the first step, which compiles."""
    build_s: float
    peak_bytes: int
    """The peak of the device that held the most, parameters and optimizer states included."""


Step = Callable[[Mapping[str, Tensor]], float]


def _times(step: Step, batches: Sequence[Mapping[str, Tensor]]) -> tuple[float, list[float]]:
    """Return the loss of the first step, and the seconds of every step until its metrics are there.

    Work of the optimizer that is still queued then counts in the next step.
    """
    losses, seconds = [], []
    for batch in batches:
        started = time.perf_counter()
        losses.append(step(batch))
        seconds.append(time.perf_counter() - started)
    return losses[0], seconds


# ------------------------------------------------------------------------------------------------- the engine


class _Setup(NamedTuple):
    """The setup that all contenders of a case share."""

    device_names: list[str]
    dense: ModelShape
    compute_dtype: torch.dtype
    recomputes: bool
    compiles: bool
    float8: bool = False
    """The engine's blocks multiply in float8."""


def _engine_steps(job: _Setup, batches: Sequence[Mapping[str, Tensor]]) -> _Steps:
    started = time.perf_counter()
    device_type = job.device_names[0].partition(":")[0]
    engine = TrainEngine(make_policy(job.dense, job.compute_dtype, device_type))
    engine.build(
        devices=job.device_names,
        data_parallel_size=len(job.device_names),
        compute_dtype="float8" if job.float8 else str(job.compute_dtype).removeprefix("torch."),
        activation_checkpointing=job.recomputes,
        compile=job.compiles,
        timeout_s=_TIMEOUT_S,
    )
    with engine:
        build_s = time.perf_counter() - started
        loss_fn = ppo_clip(clip_low=_CLIP_LOW, clip_high=_CLIP_HIGH)

        def step(batch: Mapping[str, Tensor]) -> float:
            most = len(batch["input_ids"]) // len(job.device_names)
            return engine.train_batch(batch, loss_fn, max_tokens_per_micro_batch=most)["loss"]

        loss, warm = _times(step, batches[:_WARM_UP])
        engine.call("reset_peak")
        _, seconds = _times(step, batches[_WARM_UP:])
        peak = max(report["stats"].peak_allocated_bytes for report in engine.memory_report())
    return _Steps(loss, seconds, warm[0], build_s, peak)


# --------------------------------------------------------------------------------------------- the plain loop


class _PackedLogits(nn.Module):
    """A causal language model that gives the logits of every token of a packed batch."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        from rlcore.packed.attention import packed_hidden_states  # transformers is an extra

        logits: Tensor = self.model.lm_head(packed_hidden_states(self.model.model, input_ids, cu_seqlens))
        return logits


def sharded(
    model: Any, scored_class: Callable[[Any], nn.Module], dtype: torch.dtype, device: Device, mesh: Any = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard a model on the meta device by FSDP2, give it its weights, and return it with its optimizer.

    Args:
        scored_class: the module around the model that a loop calls.
        dtype: the dtype that the model computes in; its parameters are float32.
        mesh: a mesh of all ranks; None is torch's own.
    """
    weights = Drawn(model, dtype, device.type)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    scored = scored_class(model.float())
    fully_shard(scored, mesh=mesh, mp_policy=policy)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}  # rotary tables: in no checkpoint
    scored.to_empty(device=device.torch_device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        for name, parameter in model.named_parameters():
            whole = weights[name][...].float()
            parameter.to_local().copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])
    return scored, torch.optim.AdamW(scored.parameters(), lr=1e-6, fused=True)


def _ppo(logits_TV: Tensor, tokens: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    all_TV = logits_TV.float().log_softmax(-1)
    logprob_T = all_TV.gather(1, tokens["targets"][:, None]).squeeze(1)
    with torch.no_grad():
        entropy = -(tokens["weight"] * (all_TV.exp() * all_TV).sum(1)).sum()
    ratio_T = (logprob_T - tokens["old_logprobs"]).exp()
    clipped_T = ratio_T.clamp(1 - _CLIP_LOW, 1 + _CLIP_HIGH)
    gain_T = torch.minimum(ratio_T * tokens["advantages"], clipped_T * tokens["advantages"])
    return -(tokens["weight"] * gain_T).sum(), entropy


class _Plain(BenchWorker):
    """One rank of the loop that FSDP2's own tutorial has, with all that makes it fast."""

    def run(self, job: _Setup, batches: Sequence[Mapping[str, Tensor]]) -> _Steps:
        started = time.perf_counter()
        scored, optimizer = self._build(job)
        build_s = time.perf_counter() - started
        loss_fn = torch.compile(_ppo) if job.compiles else _ppo

        def step(batch: Mapping[str, Tensor]) -> float:
            tokens = self._tokens(batch)
            logits_TV = scored(tokens["input_ids"], tokens["cu_seqlens"])
            loss, entropy = loss_fn(logits_TV, tokens)
            del logits_TV
            (loss * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]  # FSDP takes the mean
            torch.nn.utils.clip_grad_norm_(scored.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            metrics = torch.stack([loss.detach(), entropy])
            dist.all_reduce(metrics)
            return float(metrics[0])

        loss, warm = _times(step, batches[:_WARM_UP])
        self.device.memory.reset_peak()
        _, seconds = _times(step, batches[_WARM_UP:])
        return _Steps(loss, seconds, warm[0], build_s, self.device.memory.stats().peak_allocated_bytes)

    def _build(self, job: _Setup) -> tuple[nn.Module, torch.optim.Optimizer]:
        self.context.process_group(_TIMEOUT_S)
        with meta_device():
            model = transformers_class("Qwen2ForCausalLM")._from_config(job.dense.config())
        for block in model.model.layers:
            if job.recomputes:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            if job.compiles:
                block.forward = torch.compile(block.forward)
        return sharded(model, _PackedLogits, job.compute_dtype, self.device)

    def _tokens(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's share of the batch, on its device; ``cu_seqlens`` stays on the host."""
        bounds = batch["cu_seqlens"].tolist()
        rank, size = self.context.rank, self.context.world_size
        own = list(itertools.pairwise(bounds))[rank::size]  # of each length one
        rows = torch.cat([torch.arange(start, end) for start, end in own])
        ends = torch.tensor([end - start for start, end in own]).cumsum(0)
        weight = torch.ones(len(rows))
        weight[ends - 1] = 0.0  # the last token of a sequence predicts nothing
        given = {
            "input_ids": batch["input_ids"].index_select(0, rows),  # [rows] would wake every thread of the host
            "weight": weight / (bounds[-1] - len(bounds) + 1),
            **{name: batch[name].index_select(0, rows).roll(-1) for name in ("old_logprobs", "advantages")},
        }
        given["targets"] = given["input_ids"].roll(-1)
        cu_seqlens = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
        return {name: tensor.to(self.device.torch_device) for name, tensor in given.items()} | {
            "cu_seqlens": cu_seqlens
        }


def _plain_steps(job: _Setup, batches: Sequence[Mapping[str, Tensor]]) -> _Steps:
    number = len(job.device_names)
    launcher = choose_launcher(None, number)
    group = start_workers(_Plain, "the plain loop", job.device_names, launcher=launcher, timeout_s=_TIMEOUT_S)
    try:
        found: list[_Steps] = group.call("run", [((job, batches), {})] * number)
    finally:
        group.stop()
    slowest = [max(times) for times in zip(*(one.seconds for one in found), strict=True)]
    return found[0]._replace(seconds=slowest, peak_bytes=max(one.peak_bytes for one in found))


# ------------------------------------------------------------------------------------------------------ cases


def _prepare(dense: ModelShape, device: Device) -> Work:
    is_host = device.spec.is_host
    if is_host and dense is not QWEN_1_5B:
        raise UnsupportedError(f"{dense.name} on {device.name}", "it is for accelerators")
    model, tokens = (TINY, _HOST_TOKENS) if is_host else (dense, _TOKENS)
    num_devices = 1 if is_host else device.count()
    job = _Setup(
        device_names=[f"{device.spec.name}:{index}" for index in range(num_devices)],
        dense=model,
        compute_dtype=torch.float32 if is_host else torch.bfloat16,
        # A 7B with its optimizer leaves one device of 141 GB no room for the activations of 8k tokens.
        recomputes=dense is QWEN_7B and num_devices == 1,
        compiles=not is_host,
    )
    model.config()  # transformers is there
    count = _WARM_UP + _STEPS
    of_lengths = {
        "equal": [[tokens // _PER_DEVICE] * _PER_DEVICE] * count,
        "uneven": [[length * tokens // _TOKENS for length in some] for some in (_UNEVEN * count)[:count]],
    }
    first_losses: dict[tuple[str, int], float] = {}

    def contender(name: str, run: Callable[[_Setup, Any], _Steps], lengths: str, job: _Setup = job) -> Contender:
        num = len(job.device_names)
        batches = [
            packed_batch(model.vocabulary, [length for length in some for _ in range(num)], seed=len(some))
            for some in of_lengths[lengths]
        ]

        def run_alone() -> _Steps:
            gc.collect()
            device.memory.empty_cache()
            torch.compiler.reset()  # blocks of all contenders are one function to it, which it compiles a few times
            return run(job, batches)

        def check(done: _Steps) -> None:
            expected = first_losses.setdefault((lengths, num), done.loss)
            tolerance = _FLOAT8_TOLERANCE if job.float8 else _TOLERANCE
            expect(abs(done.loss - expected) <= tolerance, f"the loss is {done.loss}, and elsewhere {expected}")

        return Contender(
            name,
            run_alone,
            check,
            seconds=lambda done: done.seconds,
            quantities=lambda done: _quantities(done, tokens, is_counted=not is_host),
            params={"lengths": lengths, "recompute": str(job.recomputes), "devices": num},
            limits={}
            if is_host
            else {f"product/{str(job.compute_dtype).removeprefix('torch.')}": 6 * model.num_multiplied * tokens},
        )

    plain, engine = ("torch FSDP2", _plain_steps), ("engine", _engine_steps)
    contenders = [contender(*plain, "equal"), contender(*engine, "equal")]
    if dense is not QWEN_7B:  # questions of attention and of the host, and one model answers them
        contenders += [contender(*one, "uneven") for one in ([engine] if is_host else [plain, engine])]
    else:
        contenders.append(contender("engine, float8", _engine_steps, "equal", job._replace(float8=True)))
    if num_devices > 1 and dense is not QWEN_7B:
        alone = job._replace(device_names=job.device_names[:1])
        contenders.append(contender("engine on one device", _engine_steps, "equal", alone))
    return Work(
        tuple(contenders),
        {
            "model": model.name,
            "tokens": tokens,
            "dtype": str(job.compute_dtype).removeprefix("torch."),
        },
        num_runs=1,
    )


def _quantities(done: _Steps, tokens: int, *, is_counted: bool) -> dict[str, Quantity]:
    found = {
        "tokens_a_device": Quantity([tokens / seconds for seconds in done.seconds], "token/s"),
        "first_step": Quantity(done.first_s, "s"),
        "build": Quantity(done.build_s, "s"),
    }
    return found | ({"peak_memory": Quantity(done.peak_bytes, "B")} if is_counted else {})


cases = (
    Case(
        "train/dense_1.5b",
        "a step of 8k packed tokens a device, 1.5B: the engine beside a plain FSDP2 loop, uneven lengths too",
        functools.partial(_prepare, QWEN_1_5B),
        effort="full",
        estimate_s=90.0,
    ),
    Case(
        "train/dense_7b",
        "a step of 8k packed tokens a device, 7B: the engine beside a plain FSDP2 loop",
        functools.partial(_prepare, QWEN_7B),
        effort="full",
        estimate_s=70.0,
    ),
)
