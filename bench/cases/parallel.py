"""A step on one long sequence over two devices: the train engine's ways, beside torch's context parallelism.

The plain loop shards the same model by FSDP2 over the same ranks, recomputes the same blocks, and cuts the sequence for
torch's ring attention (``torch.distributed.tensor.experimental.context_parallel``), balanced as that does it. Its loss
is over chunks of rows that are made again in the backward: the logits of all would not fit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.utils.checkpoint import checkpoint

from rlcore.bench.case import Case, Contender, Quantity, Work
from rlcore.bench.cases.agreement import tolerance
from rlcore.bench.cases.models import QWEN_0_5B, TINY, packed_batch
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
    sharded,
)
from rlcore.device import Device
from rlcore.errors import UnsupportedError

_NUM_DEVICES = 2
_LONGEST = 131_072
_WARM_UP, _STEPS = 1, 2
_ROWS = 4096
"""Rows of the plain loop's logits at a time."""


class _Scored(nn.Module):
    """A causal language model with attention around the ring, that gives the sum of a policy loss over its rows, or
    without ``per_token`` the log-probability of each."""

    def __init__(self, model: Any) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface  # an extra

        super().__init__()
        AttentionInterface.register("rlcore_bench_ring", _ring_attention)
        AttentionMaskInterface.register("rlcore_bench_ring", lambda **_: None)
        model.config._attn_implementation_internal = "rlcore_bench_ring"
        self.model = model

    def forward(
        self, input_ids: Tensor, positions: Tensor, targets: Tensor, per_token: tuple[Tensor, ...] | None = None
    ) -> Tensor:
        hidden_TH = self.model.model(input_ids=input_ids, position_ids=positions, use_cache=False).last_hidden_state[0]
        weight = self.model.lm_head.weight
        if per_token is None:
            rows = zip(torch.split(hidden_TH, _ROWS), torch.split(targets[0], _ROWS), strict=True)
            return torch.cat([logprob_of(nn.functional.linear(some, weight), right) for some, right in rows])
        all_rows = (hidden_TH, targets[0], *(one[0] for one in per_token))
        chunks = zip(*(one.split(_ROWS) for one in all_rows), strict=True)
        return torch.stack([checkpoint(_ppo, weight, *chunk, use_reentrant=False) for chunk in chunks]).sum()


def _ppo(  # noqa: PLR0917  # checkpoint passes them on by place
    weight: Tensor, hidden: Tensor, targets: Tensor, old: Tensor, advantage: Tensor, share: Tensor
) -> Tensor:
    logits = nn.functional.linear(hidden, weight).float()
    logprob = -nn.functional.cross_entropy(logits, targets, reduction="none")
    return -(share * clipped_gain(logprob, old, advantage)).sum()


def _ring_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **_: Any) -> Any:
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return attended.transpose(1, 2), None


class _Ring(PlainRank):
    """One rank of a loop as torch's tutorial of context parallelism has it, over FSDP2."""

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        self._mesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("ring",))
        return sharded(self.setup, _Scored, self.device, self._mesh)

    def backward(self, scored: nn.Module, batch: Batch) -> Tensor:
        own = self._tokens(batch)
        with context_parallel(self._mesh, buffers=list(own.values()), buffer_seq_dims=[1] * len(own)):
            per_token = own["old_logprobs"], own["advantages"], own["share"]
            loss = scored(own["input_ids"], own["positions"], own["targets"], per_token)
            (loss * dist.get_world_size()).backward()  # FSDP takes the mean
        return loss.detach()[None]  # type: ignore[no-any-return]

    def logprobs(self, scored: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        own = self._tokens(batch)
        with context_parallel(self._mesh, buffers=list(own.values()), buffer_seq_dims=[1] * len(own)):
            logprob_T = scored(own["input_ids"], own["positions"], own["targets"])
            scores_T = own["share"][0] > 0
            return own["positions"][0][scores_T] + 1, logprob_T[scores_T]

    def _tokens(self, batch: Batch) -> dict[str, Tensor]:
        """Return the whole sequence on this rank's device; ``context_parallel`` cuts it in place."""
        count = len(batch["input_ids"])
        share = torch.full((count,), 1 / (count - 1))
        share[-1] = 0.0  # the last token predicts nothing
        rows = {
            "input_ids": batch["input_ids"],
            "positions": torch.arange(count),
            "targets": batch["input_ids"].roll(-1),
            "share": share,
            **{name: batch[name].roll(-1) for name in ("old_logprobs", "advantages")},
        }
        return {name: row[None].to(self.device.torch_device) for name, row in rows.items()}


def _prepare(tokens: int, device: Device) -> Work:
    is_host = device.spec.is_host
    if not is_host and device.count() < _NUM_DEVICES:
        raise UnsupportedError(f"this case on {device.count()} {device.spec.name}", "it compares ways to use two")
    shared = Setup(
        device_names=[f"{device.spec.name}:{index}" for index in range(_NUM_DEVICES)],
        model=TINY if is_host else QWEN_0_5B,
        dtype=torch.float32 if is_host else torch.bfloat16,
        tokens=tokens // 128 if is_host else tokens,
        warm_up=_WARM_UP,
        recomputes=True,
    )
    shared.model.config()  # transformers is there
    batches = [packed_batch(shared.model.vocabulary, [shared.tokens], seed=0)] * (_WARM_UP + _STEPS)
    compared, allowed = Compared(device), tolerance(shared.model, shared.dtype, shared.tokens)

    def contender(name: str, steps: Callable[..., StepTimes], number: int = _NUM_DEVICES) -> Contender:
        setup = shared._replace(device_names=shared.device_names[:number])
        return compared.contender(
            name,
            lambda: steps(setup, batches),
            lambda done: {} if is_host else {"peak_memory": Quantity(done.peak_bytes, "B")},
            allowed,
            params={"devices": number},
        )

    def engine(name: str, **sizes: Any) -> Contender:
        return contender(name, functools.partial(engine_steps, **sizes), math.prod(sizes.values()))

    contenders = [engine("engine, Ulysses", sequence_parallel_size=_NUM_DEVICES)]
    if not is_host:  # torch's ring attention has no kernel of a host
        contenders.append(contender("torch context parallel", functools.partial(plain_steps, _Ring)))
    if tokens < _LONGEST:
        contenders.append(engine("engine, tensor parallel", tensor_parallel_size=_NUM_DEVICES))
    contenders.append(engine("engine on one device"))
    return Work(tuple(contenders), {**shared.params, "recompute": str(shared.recomputes)}, num_runs=1)


cases = tuple(
    Case(
        f"train/long_sequence_{tokens // 1024}k",
        f"a step on one sequence of {tokens // 1024}k tokens over two devices, beside torch's context parallelism",
        functools.partial(_prepare, tokens),
        effort="full",
        estimate_s=60.0,
        device_estimate_s=60.0 if tokens < _LONGEST else 110.0,
    )
    for tokens in (32_768, _LONGEST)
)
