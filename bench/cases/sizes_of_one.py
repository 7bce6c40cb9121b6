"""A step of an engine that is built with sizes of 1 for its ranks beside one that is built without any.

``build`` gives an executor no size of 1, so that both should run the same operators; this holds them to it. Both
engines are there at once, and take their steps in turns. Before its first step each has to score with the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack

import torch
from torch import Tensor

from rlcore.bench.case import Case, Contender, Work, expect
from rlcore.bench.cases.models import QWEN_1_5B, TINY, packed_batch, policy
from rlcore.bench.cases.train_steps import CLIP_HIGH, CLIP_LOW, Batch
from rlcore.device import Device
from rlcore.engines.train import TrainEngine
from rlcore.kernels.losses.policy import ppo_clip
from rlcore.tensor_data import dtype_name

SIZES = dict.fromkeys((f"{kind}_parallel_size" for kind in ("sequence", "tensor", "expert")), 1)
_TOKENS, _HOST_TOKENS = 4096, 256
_SEQUENCES = 8


class _SteppedEngine:
    """An engine on one device, and what it scored before it was trained."""

    def __init__(self, engine: TrainEngine, batch: Batch) -> None:
        self._engine, self._batch = engine, batch
        self.logprob_T: Tensor = engine.forward_logprobs(batch)

    def step(self) -> Mapping[str, float]:
        loss_fn = ppo_clip(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)
        return self._engine.train_batch(self._batch, loss_fn)


def _prepare(device: Device) -> Work:
    is_host = device.spec.is_host
    model, tokens = (TINY, _HOST_TOKENS) if is_host else (QWEN_1_5B, _TOKENS)
    dtype = torch.float32 if is_host else torch.bfloat16
    batch = packed_batch(model.vocabulary, [tokens // _SEQUENCES] * _SEQUENCES, seed=0)
    engines = ExitStack()

    def trainer(**sizes: int) -> _SteppedEngine:
        engine = engines.enter_context(TrainEngine(policy(model, dtype, device.type)))
        return _SteppedEngine(engine.build(devices=device.name, compute_dtype=dtype_name(dtype), **sizes), batch)

    def check(one: _SteppedEngine, metrics: Mapping[str, float]) -> None:
        expect(torch.equal(one.logprob_T, without.logprob_T), "log-probs are not those of the engine without sizes")
        expect(metrics["num_tokens"] == tokens - _SEQUENCES, f"{metrics['num_tokens']} tokens were trained on")

    with engines:
        without, with_ones = trainer(), trainer(**SIZES)
        contenders = [
            Contender(name, one.step, functools.partial(check, one))
            for name, one in (("engine", without), ("engine, sizes of 1", with_ones))
        ]
        params: dict[str, int | float | str] = {"model": model.name, "tokens": tokens, "dtype": dtype_name(dtype)}
        return Work(tuple(contenders), params, close=engines.pop_all().close)


cases = (
    Case(
        "train/sizes_of_one",
        "a step of 4k tokens, 1.5B, with sequence, tensor and expert parallel sizes of 1, beside none given",
        _prepare,
        effort="full",
        estimate_s=20.0,
    ),
)
