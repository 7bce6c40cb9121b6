"""A step of the train engine beside a plain loop of torch's FSDP2, and packed lengths that differ beside equal ones.

Both have the same packed attention, compiled blocks, recomputation and fused AdamW. The plain loop makes the logits of
every token and compiles the loss over them, and its compiler chooses by itself what blocks keep for their backward; the
engine tells its own (``block_compiler``). Where there are several devices the engine also runs on one, to show what
each of several loses, and with ``reshard_after_forward=False``, which gathers less.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlcore.bench.case import Case, Contender, Quantity, Work
from rlcore.bench.cases.agreement import tolerance
from rlcore.bench.cases.models import QWEN_1_5B, QWEN_7B, TINY, ModelShape, packed_batch
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
from rlcore.tensor_data import dtype_name

_TOKENS, _HOST_TOKENS = 8192, 256
"""Tokens of each device and step."""
_LEAST_S = 1e-9
"""Instead of nothing beyond the device's time: a record's values are positive."""
_PER_DEVICE = 8
"""Sequences of equal length."""
_UNEVEN = (
    (4096, 2048, 1024, 512, 256, 128, 64, 64),
    (3072, 2048, 1536, 768, 384, 192, 128, 64),
    (4096, 1024, 1024, 1024, 512, 256, 128, 64, 64),
)
"""Lengths that come to as many tokens; those on a host are a part of them."""
_WARM_UP, _STEPS = 3, 6


class _PackedLogits(nn.Module):
    """A causal language model that gives the logits of every token of a packed batch."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        from rlcore.packed.attention import packed_hidden_states  # transformers is an extra

        logits: Tensor = self.model.lm_head(packed_hidden_states(self.model.model, input_ids, cu_seqlens))
        return logits


def _ppo(logits_TV: Tensor, tokens: Batch) -> tuple[Tensor, Tensor]:
    all_TV = logits_TV.float().log_softmax(-1)
    logprob_T = all_TV.gather(1, tokens["targets"][:, None]).squeeze(1)
    with torch.no_grad():
        entropy = -(tokens["weight"] * (all_TV.exp() * all_TV).sum(1)).sum()
    gain_T = clipped_gain(logprob_T, tokens["old_logprobs"], tokens["advantages"])
    return -(tokens["weight"] * gain_T).sum(), entropy


class _Plain(PlainRank):
    """One rank of the loop that FSDP2's own tutorial has, with all that makes it fast."""

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        self._loss_fn = torch.compile(_ppo) if self.setup.compiles else _ppo
        return sharded(self.setup, _PackedLogits, self.device)

    def backward(self, scored: nn.Module, batch: Batch) -> Tensor:
        tokens = self._tokens(batch)
        logits_TV = scored(tokens["input_ids"], tokens["cu_seqlens"])
        loss, entropy = self._loss_fn(logits_TV, tokens)
        del logits_TV
        (loss * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]  # FSDP takes the mean
        return torch.stack([loss.detach(), entropy])

    def logprobs(self, scored: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        tokens, rows = self._tokens(batch), torch.cat([torch.arange(*one) for one in self._own(batch)])
        logprob_T = logprob_of(scored(tokens["input_ids"], tokens["cu_seqlens"]), tokens["targets"])
        scores_T = tokens["weight"] > 0
        return rows.to(scores_T.device)[scores_T] + 1, logprob_T[scores_T]

    def _own(self, batch: Batch) -> list[tuple[int, int]]:
        """This rank's sequences, of each length one: where they begin and end."""
        rank, size = self.context.rank, self.context.world_size
        return list(itertools.pairwise(batch["cu_seqlens"].tolist()))[rank::size]

    def _tokens(self, batch: Batch) -> dict[str, Tensor]:
        """This rank's share of the batch, on its device; ``cu_seqlens`` stays on the host."""
        own, bounds = self._own(batch), batch["cu_seqlens"].tolist()
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


def _engine(setup: Setup, batches: list[Batch], **options: Any) -> StepTimes:
    return engine_steps(setup, batches, tells_busy=True, data_parallel_size=len(setup.device_names), **options)


def _setup(dense: ModelShape, device: Device) -> Setup:
    is_host = device.spec.is_host
    num_devices = 1 if is_host else device.count()
    return Setup(
        device_names=[f"{device.spec.name}:{index}" for index in range(num_devices)],
        model=TINY if is_host else dense,
        dtype=torch.float32 if is_host else torch.bfloat16,
        tokens=_HOST_TOKENS if is_host else _TOKENS,
        warm_up=_WARM_UP,
        # A 7B with its optimizer leaves one device of 141 GB no room for the activations of 8k tokens.
        recomputes=dense is QWEN_7B and num_devices == 1,
        compiles=not is_host,
    )


def _prepare(dense: ModelShape, device: Device) -> Work:
    is_host = device.spec.is_host
    if is_host and dense is not QWEN_1_5B:
        raise UnsupportedError(f"{dense.name} on {device.name}", "it is for accelerators")
    shared = _setup(dense, device)
    model, tokens, limit = shared.model, shared.tokens, f"product/{dtype_name(shared.dtype)}"
    model.config()  # transformers is there
    count = _WARM_UP + _STEPS
    of_lengths = {
        "equal": [[tokens // _PER_DEVICE] * _PER_DEVICE] * count,
        "uneven": [[length * tokens // _TOKENS for length in some] for some in (_UNEVEN * count)[:count]],
    }
    flops = {name: _mean_flops(model, some[_WARM_UP:]) for name, some in of_lengths.items()}
    compared = Compared(device)

    def contender(
        name: str, steps: Callable[..., StepTimes], lengths: str, setup: Setup = shared, *, float8: bool = False
    ) -> Contender:
        num = len(setup.device_names)
        batches = [
            packed_batch(model.vocabulary, [length for length in some for _ in range(num)], seed=len(some))
            for some in of_lengths[lengths]
        ]
        return compared.contender(
            name,
            lambda: steps(setup, batches),
            lambda done: _quantities(done, tokens, flops[lengths], is_counted=not is_host),
            tolerance(model, setup.dtype, max(map(max, of_lengths[lengths])), float8=float8),
            same=(lengths, num),
            params={"lengths": lengths, "recompute": str(setup.recomputes), "devices": num},
            limits={} if is_host else {limit: 6 * model.num_multiplied * tokens},
        )

    ways: dict[str, Callable[..., StepTimes]] = {
        "torch FSDP2": functools.partial(plain_steps, _Plain),
        "engine": _engine,
    }
    contenders = [contender(name, steps, "equal") for name, steps in ways.items()]
    if dense is not QWEN_7B:  # questions of attention and of the host, and one model answers them
        shown = ["engine"] if is_host else list(ways)
        contenders += [contender(name, ways[name], "uneven") for name in shown]
    else:
        float8 = functools.partial(_engine, compute_dtype="float8")
        contenders.append(contender("engine, float8", float8, "equal", float8=True))
    if len(shared.device_names) > 1:
        kept = functools.partial(_engine, reshard_after_forward=False)
        contenders.append(contender("engine, blocks kept", kept, "equal"))
    if len(shared.device_names) > 1 and dense is not QWEN_7B:
        alone = shared._replace(device_names=shared.device_names[:1])
        contenders.append(contender("engine on one device", _engine, "equal", alone))
    return Work(tuple(contenders), shared.params, num_runs=1)


def _mean_flops(model: ModelShape, batches: list[list[int]]) -> float:
    """Return the multiplications and additions of a step on one device: a forward, and a backward of twice as many.

    Each token attends to those before it, so that long sequences have more than short ones of as many tokens.
    """
    squares = sum(length * length for lengths in batches for length in lengths) / len(batches)
    tokens = sum(map(sum, batches)) / len(batches)
    return 6 * (model.num_multiplied * tokens + model.layers * model.q * squares)


def _quantities(done: StepTimes, tokens: int, flops: float, *, is_counted: bool) -> dict[str, Quantity]:
    found = {
        "tokens_a_device": Quantity([tokens / seconds for seconds in done.seconds], "token/s"),
        "flops_a_device": Quantity([flops / seconds for seconds in done.seconds], "FLOP/s"),
        "first_step": Quantity(done.first_s, "s"),
        "build": Quantity(done.build_s, "s"),
    }
    if (seen := done.seen) is not None:
        beyond_s = statistics.median(done.seconds) - seen.busy_s
        found |= {
            "device_busy": Quantity(seen.busy_s, "s"),
            "beyond_device": Quantity(max(_LEAST_S, beyond_s), "s"),
            "between_launches": Quantity(max(_LEAST_S, seen.between_s), "s"),
            "launches": Quantity(seen.launches, "launch"),
        }
    return found | ({"peak_memory": Quantity(done.peak_bytes, "B")} if is_counted else {})


cases = (
    Case(
        "train/dense_1.5b",
        "a step of 8k packed tokens a device, 1.5B: the engine beside a plain FSDP2 loop, uneven lengths too",
        functools.partial(_prepare, QWEN_1_5B),
        effort="full",
        estimate_s=125.0,
    ),
    Case(
        "train/dense_7b",
        "a step of 8k packed tokens a device, 7B: the engine beside a plain FSDP2 loop",
        functools.partial(_prepare, QWEN_7B),
        effort="full",
        estimate_s=105.0,
    ),
)
