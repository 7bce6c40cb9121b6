"""An optimizer step under DeepSpeed's ZeRO: rlcore's executor, DeepSpeed's engine in a loop of its own, and FSDP2.

The plain loop has the same configuration of ZeRO. It computes as users of DeepSpeed write it: rows through the model's
own forward, and the logits of all tokens. rlcore's executors pack the rows, and hold no logits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rlcore.bench.case import Case, Contender, Quantity, Work
from rlcore.bench.cases.agreement import tolerance
from rlcore.bench.cases.models import LEARNING_RATE, QWEN_1_5B, TINY, drawn, packed_batch, transformers_class
from rlcore.bench.cases.train_steps import (
    Batch,
    Compared,
    PlainRank,
    Setup,
    StepTimes,
    clipped_gain,
    engine_steps,
    logprob_of,
    plain_steps,
)
from rlcore.device import Device
from rlcore.engines.deepspeed.library import check_installed, deepspeed_for
from rlcore.engines.deepspeed.options import ZeroOptions
from rlcore.tensor_data import dtype_name

_STAGES = (2, 3)
_TOKENS, _HOST_TOKENS = 4096, 256
_SEQUENCES = 8
"""Sequences of equal length."""
_WARM_UP, _STEPS = 3, 8


class _ZeroLoop(PlainRank):
    """A policy-gradient step of a DeepSpeed engine."""

    stage: int

    def build(self) -> tuple[Any, torch.optim.Optimizer]:
        setup, library = self.setup, deepspeed_for(self.device)
        library.init_distributed(self.device.collectives.backend, dist_init_required=False)
        with self.device.torch_device:
            model = transformers_class("Qwen2ForCausalLM")._from_config(setup.model.config(), dtype=setup.dtype)
        weights = drawn(model, setup.dtype, self.device.type)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name][...])
        options = ZeroOptions(stage=self.stage, compute_dtype=dtype_name(setup.dtype))
        config = options.deepspeed_config(sum(one.numel() for one in model.parameters()))
        config |= {"gradient_clipping": 1.0, "managed_gradient_accumulation": True}
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        return engine, optimizer

    def step(self, scored: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> tuple[Tensor, Tensor | float]:
        rows = {name: batch[name].view(_SEQUENCES, -1).to(scored.device) for name in ("input_ids", "old_logprobs")}
        advantages = batch["advantages"].view(_SEQUENCES, -1).to(scored.device)
        logits = scored(input_ids=rows["input_ids"]).logits
        logprob = logits[:, :-1].float().log_softmax(-1).gather(2, rows["input_ids"][:, 1:, None])[..., 0]
        loss = -clipped_gain(logprob, rows["old_logprobs"][:, 1:], advantages[:, 1:]).mean()
        scored.backward(loss)
        scored.step()
        return loss.detach()[None], scored.get_global_grad_norm()

    def logprobs(self, scored: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        place = torch.arange(len(batch["input_ids"]), device=scored.device).view(_SEQUENCES, -1)[:, 1:]
        rows = batch["input_ids"].view(_SEQUENCES, -1).to(scored.device)
        logits = scored(input_ids=rows).logits[:, :-1]
        return place.flatten(), logprob_of(logits.flatten(0, 1), rows[:, 1:].flatten())


class _ZeroLoop2(_ZeroLoop):
    stage = 2


class _ZeroLoop3(_ZeroLoop):
    stage = 3


def _prepare(device: Device) -> Work:
    check_installed()
    is_host = device.spec.is_host
    tokens = _HOST_TOKENS if is_host else _TOKENS
    setup = Setup(
        device_names=[device.name],
        model=TINY if is_host else QWEN_1_5B,
        dtype=torch.float32 if is_host else torch.bfloat16,
        tokens=tokens,
        warm_up=_WARM_UP,
        recomputes=False,
    )
    setup.model.config()  # transformers is there
    lengths = [tokens // _SEQUENCES] * _SEQUENCES
    batches = [packed_batch(setup.model.vocabulary, lengths, seed) for seed in range(_WARM_UP + _STEPS)]
    compared = Compared(device)
    ways: dict[str, Any] = {"fsdp2": engine_steps}
    if not is_host:
        ways["fsdp2, compiled"] = functools.partial(engine_steps, compile=True)
    for stage, plain in zip(_STAGES, (_ZeroLoop2, _ZeroLoop3), strict=True):
        ways[f"deepspeed, ZeRO {stage}"] = functools.partial(engine_steps, executor="deepspeed", stage=stage)
        # in a process of its own: DeepSpeed leaves its groups in globals
        ways[f"plain DeepSpeed, ZeRO {stage}"] = functools.partial(plain_steps, plain, launcher="process")
    limits = {} if is_host else {f"product/{dtype_name(setup.dtype)}": 6 * setup.model.num_multiplied * tokens}

    def quantities(done: StepTimes) -> dict[str, Quantity]:
        found = {"tokens": Quantity([tokens / seconds for seconds in done.seconds], "token/s")}
        return found | ({} if is_host else {"peak_memory": Quantity(done.peak_bytes, "B")})

    allowed = tolerance(setup.model, setup.dtype, lengths[0])

    def contender(name: str, steps: Any) -> Contender:
        run = functools.partial(steps, setup=setup, batches=batches)
        return compared.contender(name, run, quantities, allowed, limits=limits)

    contenders = [contender(name, steps) for name, steps in ways.items()]
    return Work(tuple(contenders), {**setup.params, "devices": 1}, num_runs=1)


cases = (
    Case(
        "train/zero",
        "a step of 4k tokens, 1.5B: ZeRO 2 and 3 beside DeepSpeed without rlcore, and beside FSDP2",
        _prepare,
        effort="full",
        estimate_s=90.0,
        device_estimate_s=180.0,
    ),
)
