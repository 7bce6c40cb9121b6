"""A step of a mixture of experts over two devices, which gather all experts of a block, or have them among them.

The batch says which experts each token has, drawn evenly: routers that rounded another way would send tokens elsewhere.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from rlcore.bench.case import Case, Contender, Quantity, Work
from rlcore.bench.cases.agreement import tolerance
from rlcore.bench.cases.models import QWEN_30B_A3B, TINY_EXPERTS, ModelShape, packed_batch
from rlcore.bench.cases.train_steps import Batch, Compared, Setup, StepTimes, engine_steps
from rlcore.device import Device
from rlcore.errors import UnsupportedError

_NUM_DEVICES = 2
_LAYERS = 6
"""The model has 48; parameters, gradients and optimizer states of so many take 35 GB of each device."""
_LENGTH, _PER_DEVICE = 1024, 8
"""Tokens of a sequence, and sequences of each device."""
_HOST_LENGTH = 32
_WARM_UP, _STEPS = 2, 5


def _batch(model: ModelShape, lengths: list[int]) -> Batch:
    batch = packed_batch(model.vocabulary, lengths, seed=0)
    scores = torch.rand(sum(lengths), model.layers, model.experts, generator=torch.Generator().manual_seed(1))
    return batch | {"routed_experts": scores.topk(model.experts_of_token, dim=-1).indices.to(torch.int16)}


def _prepare(device: Device) -> Work:
    is_host = device.spec.is_host
    if not is_host and device.count() < _NUM_DEVICES:
        raise UnsupportedError(f"this case on {device.count()} {device.spec.name}", "it compares ways to use two")
    length = _HOST_LENGTH if is_host else _LENGTH
    setup = Setup(
        device_names=[f"{device.spec.name}:{index}" for index in range(_NUM_DEVICES)],
        model=TINY_EXPERTS if is_host else replace(QWEN_30B_A3B, layers=_LAYERS),
        dtype=torch.float32 if is_host else torch.bfloat16,
        tokens=length * _PER_DEVICE,
        warm_up=_WARM_UP,
        recomputes=True,
    )
    setup.model.config()  # transformers is there
    batches = [_batch(setup.model, [length] * _PER_DEVICE * _NUM_DEVICES)] * (_WARM_UP + _STEPS)
    compared, allowed = Compared(device), tolerance(setup.model, setup.dtype, length)

    def quantities(done: StepTimes) -> dict[str, Quantity]:
        found = {"tokens_a_device": Quantity([setup.tokens / seconds for seconds in done.seconds], "token/s")}
        return found | ({} if is_host else {"peak_memory": Quantity(done.peak_bytes, "B")})

    def contender(size: int) -> Contender:
        run = functools.partial(
            engine_steps, setup, batches, data_parallel_size=_NUM_DEVICES, expert_parallel_size=size
        )
        return compared.contender("engine", run, quantities, allowed, params={"expert_parallel_size": size})

    params: dict[str, int | float | str] = {
        "layers": setup.model.layers,
        "devices": _NUM_DEVICES,
        "recompute": str(setup.recomputes),
    }
    return Work((contender(1), contender(_NUM_DEVICES)), {**setup.params, **params}, num_runs=1)


cases = (
    Case(
        "train/experts",
        "a step of 8k tokens a device, 6 layers of a 30B-A3B, over two devices: all experts gathered, or half on each",
        _prepare,
        effort="full",
        estimate_s=60.0,
        device_estimate_s=90.0,
    ),
)
