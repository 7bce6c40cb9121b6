"""One optimizer step, and scoring, over micro-batches of a packed batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.device import Device
from rlcore.engines.executors.expert_load import ExpertLoad
from rlcore.engines.executors.micro_batch import MicroBatch, micro_batches, on_device
from rlcore.engines.executors.mismatch import SAMPLER_ENTRIES, Mismatch
from rlcore.engines.executors.shared_sequences import loss_of_shared_sequences
from rlcore.engines.executors.strategy import ShardingStrategy
from rlcore.engines.executors.train_options import LossOptions, ScoreOptions, StepOptions
from rlcore.engines.rank_batch import SCORED, WEIGHT, RankBatch
from rlcore.errors import InvalidInputError, RlcoreError, StateError
from rlcore.evaluation_mode import evaluation_mode
from rlcore.kernels.linear.logprob import linear_logprob
from rlcore.kernels.linear.loss import linear_loss
from rlcore.kernels.losses.interface import LossFn, sequence_level
from rlcore.kernels.token.logprob import token_logprob
from rlcore.kernels.token.nucleus import keep_mask
from rlcore.kernels.vocab_shard import gathered
from rlcore.nn import OutputHead, TrainModule, optimizers_of, schedulers_of
from rlcore.routing.counting import can_count
from rlcore.routing.replay import replaying
from rlcore.routing.routers import Router

_ROWS = 1024
"""Rows whose whole logits top-p and top-k have to see at once."""


def train_step(strategy: ShardingStrategy, batch: RankBatch, loss_fn: LossFn, options: StepOptions) -> dict[str, float]:
    """Compute gradients of the whole batch, clip them, step every optimizer and scheduler, then zero gradients.

    All ranks call this together, each with its own part of the batch.

    Args:
        strategy: the module, and how it lies over the ranks.

    Returns:
        ``loss``, ``grad_norm``, ``lr/<optimizer>`` and the statistics of the loss, the same on all ranks.

    Raises:
        StateError: the module has no optimizer.
        RlcoreError: the gradient norm is not finite; no step was taken.
    """
    module, device = strategy.module, strategy.device
    optimizers = optimizers_of(module)
    if not optimizers:
        raise StateError(
            f"train_batch needs an optimizer, and {type(module).__name__} has none; "
            "set one as an attribute in on_weights_materialized(), such as self.optimizer = torch.optim.AdamW(...)"
        )
    reading: list[Callable[[], dict[str, float]]] = []
    try:
        with strategy.computing():
            metrics = _accumulate(strategy, batch, loss_fn, options)

        def seen(norm: Tensor) -> None:
            reading.append(_begin_reading(metrics.joined(strategy.num_alike) | {"grad_norm": norm}, device))

        strategy.step(options.max_grad_norm, seen)
    finally:
        strategy.zero()
    rates = {f"lr/{name}": float(optimizer.param_groups[0]["lr"]) for name, optimizer in optimizers.items()}
    found = reading[0]() | rates
    if not math.isfinite(found["grad_norm"]):
        raise RlcoreError(
            f"the gradient norm of this batch is {found['grad_norm']}: no step was taken and the gradients were "
            "dropped. Look at the batch's values and at the loss function"
        )
    for scheduler in schedulers_of(module).values():
        scheduler.step()
    return found


def _begin_reading(numbers: Mapping[str, Tensor], device: Device) -> Callable[[], dict[str, float]]:
    """Begin to copy numbers to the host; return a function that waits for this copy alone and gives them.

    The optimizer's kernels, queued afterwards, run while the host takes up the next batch.
    """
    values = torch.stack([number.float() for number in numbers.values()]).to("cpu", non_blocking=True)
    arrived = device.streams.event()
    arrived.record()

    def read() -> dict[str, float]:
        arrived.synchronize()
        return dict(zip(numbers, values.tolist(), strict=True))

    return read


def _accumulate(strategy: ShardingStrategy, batch: RankBatch, loss_fn: LossFn, options: StepOptions) -> _Metrics:
    routers, phase = strategy.routers, strategy.device.profiler.range
    metrics = _Metrics(strategy, batch, loss_fn)
    for number, micro_batch in enumerate(_trained(strategy, batch, options), start=1):
        # the backward may compute blocks again
        with _replaying(routers, micro_batch), metrics.counting(micro_batch):
            with phase("train_batch: forward and loss"):
                loss, (stats, weight) = strategy.forward(
                    partial(_loss, strategy, micro_batch, metrics.loss_fn, options)
                )
            with phase("train_batch: backward"):
                strategy.backward(loss, is_last=number == batch.num_micro_batches)
        metrics.add(loss.detach(), stats, weight)
    return metrics


def _replaying(routers: list[Router], micro_batch: MicroBatch) -> AbstractContextManager[None]:
    return replaying(routers, micro_batch.routes, micro_batch.tokens["cu_seqlens"])


def _trained(strategy: ShardingStrategy, batch: RankBatch, options: LossOptions) -> Iterator[MicroBatch]:
    counts_T, device = batch.packed[WEIGHT] != 0, strategy.device.torch_device
    return micro_batches(batch, counts_T, options.max_tokens_per_micro_batch, device)


def _loss(
    strategy: ShardingStrategy, micro_batch: MicroBatch, loss_fn: LossFn, options: LossOptions
) -> tuple[Tensor, tuple[Mapping[str, Tensor], Tensor]]:
    """Return the loss of this rank's rows of a micro-batch, with its statistics and the sum of the token weights."""
    hidden_SH = _scoring(strategy.module, micro_batch)
    head = strategy.module.output_head()  # by now gathered, if it is sharded
    group = strategy.sequence_group
    if group is not None and isinstance(loss_fn, sequence_level):
        return loss_of_shared_sequences(hidden_SH, head, micro_batch, loss_fn, options=options, group=group)
    per_token = {name: value_R[micro_batch.own] for name, value_R in micro_batch.per_token.items()}
    weight_S = per_token.pop(WEIGHT)
    loss, stats = linear_loss(
        hidden_SH,
        targets=micro_batch.targets_S,
        loss_fn=loss_fn,
        per_token=per_token,
        token_weight=weight_S,
        cu_seqlens=micro_batch.cu_rows,
        with_entropy=options.with_entropy,
        temperature=options.temperature,
        **head._asdict(),
    )
    return loss, (stats, weight_S.sum())


def _scoring(module: TrainModule, micro_batch: MicroBatch) -> Tensor:
    """Return the hidden states [S, H] that score."""
    hidden_TH = module.hidden_states(micro_batch.tokens)
    if len(hidden_TH) != micro_batch.num_hidden:
        raise InvalidInputError(
            f"hidden_states() of {type(module).__name__} gave {len(hidden_TH)} rows; this rank has "
            f"{micro_batch.num_hidden} tokens, and it must return one row for each, in their order"
        )
    return hidden_TH[micro_batch.rows_S]


@torch.no_grad()
def evaluate(strategy: ShardingStrategy, batch: RankBatch, loss_fn: LossFn, options: LossOptions) -> dict[str, float]:
    """Return the loss and statistics that ``train_step`` would give in evaluation mode; nothing changes."""
    routers, phase = strategy.routers, strategy.device.profiler.range
    metrics = _Metrics(strategy, batch, loss_fn)
    with evaluation_mode(strategy.module), strategy.computing():
        for micro_batch in _trained(strategy, batch, options):
            with (
                phase("eval_batch: forward and loss"),
                _replaying(routers, micro_batch),
                metrics.counting(micro_batch),
            ):
                loss, (stats, weight) = strategy.forward(
                    partial(_loss, strategy, micro_batch, metrics.loss_fn, options)
                )
            metrics.add(loss, stats, weight)
    return _begin_reading(metrics.joined(strategy.num_alike), strategy.device)()


class _Metrics:
    """Statistics of micro-batches, kept on the device until the end: no host sync on the way.

    With the sampler's mismatch, which is seen as the loss runs, if a batch has its entries, and the load of experts, if
    the model has some.

    Attributes:
        loss_fn: the loss to call, so that the mismatch is seen.
    """

    def __init__(self, strategy: ShardingStrategy, batch: RankBatch, loss_fn: LossFn) -> None:
        device = strategy.device.torch_device
        self.rows: list[dict[str, Tensor]] = []
        """One for each micro-batch of this rank: its loss, weight and statistics, in the same order on all ranks."""
        self.mismatch = Mismatch(device) if any(name in batch.packed for name in SAMPLER_ENTRIES) else None
        self.loss_fn = loss_fn if self.mismatch is None else self.mismatch.watching(loss_fn)
        counted = [router for router in strategy.routers if can_count(router)]
        self.expert_load = ExpertLoad(counted, device) if counted else None

    def counting(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Return the context of the forward and backward pass of a micro-batch."""
        return nullcontext() if self.expert_load is None else self.expert_load.counting(micro_batch)

    def add(self, loss: Tensor, stats: Mapping[str, Tensor], weight: Tensor) -> None:
        self.rows.append({"loss": loss, "weight": weight, **stats})

    def joined(self, num_alike: int) -> dict[str, Tensor]:
        """Return the loss and statistics over the micro-batches of all ranks, each joined as its suffix says.

        Args:
            num_alike: neighbouring ranks that have the same rows, of which one counts.
        """
        table = torch.stack([torch.stack([value.float() for value in row.values()]) for row in self.rows])
        if dist.is_initialized() and dist.get_world_size() > 1:
            of_ranks = [torch.empty_like(table) for _ in range(dist.get_world_size())]
            dist.all_gather(of_ranks, table)
            table = torch.cat(of_ranks[::num_alike])
        columns = dict(zip(self.rows[0], table.unbind(1), strict=True))
        loss, weight = columns.pop("loss").sum(), columns.pop("weight")
        fraction = weight / weight.sum().clamp(min=torch.finfo(weight.dtype).tiny)
        found = {"loss": loss} | {name: _join(name, values, fraction) for name, values in columns.items()}
        for part in (self.mismatch, self.expert_load):
            found |= {} if part is None else part.joined()
        return found


def _join(name: str, values: Tensor, fraction: Tensor) -> Tensor:
    if name.endswith("_mean"):
        # an empty micro-batch has no weight and an undefined mean
        return torch.where(fraction > 0, values * fraction, 0.0).sum()
    if name.endswith("_sum"):
        return values.sum()
    return values.max() if name.endswith("_max") else values.min()


@torch.no_grad()
def score(strategy: ShardingStrategy, batch: RankBatch, options: ScoreOptions) -> Tensor:
    """Return the log-probability [T] float32, on the host, of every scored token of the whole batch; 0 elsewhere."""
    routers, device = strategy.routers, strategy.device.torch_device
    logprob_T = torch.zeros(batch.num_tokens, device=device)
    with evaluation_mode(strategy.module), strategy.computing():
        for micro_batch in micro_batches(batch, batch.packed[SCORED], options.max_tokens_per_micro_batch, device):
            with strategy.device.profiler.range("forward_logprobs: forward"):
                (position_S,) = on_device([batch.positions_T[micro_batch.positions_S]], device)
                with _replaying(routers, micro_batch):
                    logprob_S, _ = strategy.forward(partial(_logprobs, strategy.module, micro_batch, options))
                logprob_T[position_S] = logprob_S.float()
    if dist.is_initialized() and dist.get_world_size() > 1:
        if dist.get_rank() % strategy.num_alike:
            logprob_T.zero_()
        dist.all_reduce(logprob_T)  # each token is scored by one rank, and 0 on the others
    return logprob_T.cpu()


def _logprobs(module: TrainModule, micro_batch: MicroBatch, options: ScoreOptions) -> tuple[Tensor, None]:
    hidden_SH, head = _scoring(module, micro_batch), module.output_head()
    targets_S, temperature = micro_batch.targets_S, options.temperature
    if options.top_p == 1 and options.top_k <= 0:
        scores = linear_logprob(hidden_SH, targets=targets_S, temperature=temperature, **head._asdict())
        return scores.logprob, None
    restricted = _restricted(hidden_SH, targets_S, head, options)
    return torch.cat([*restricted, hidden_SH.new_zeros(0)]), None


def _restricted(hidden_SH: Tensor, targets_S: Tensor, head: OutputHead, options: ScoreOptions) -> Iterator[Tensor]:
    sizes = _vocabulary_sizes(head)
    for hidden, targets in zip(torch.split(hidden_SH, _ROWS), torch.split(targets_S, _ROWS), strict=True):
        product = torch.nn.functional.linear(hidden, head.weight, head.bias).float()
        logits = head.form(product if head.group is None else _whole_rows(product, sizes, head.group))
        keep = keep_mask(logits, temperature=options.temperature, top_p=options.top_p, top_k=options.top_k)
        yield token_logprob(logits, targets, temperature=options.temperature, keep_mask=keep).logprob


def _vocabulary_sizes(head: OutputHead) -> list[int]:
    """Return how many tokens each rank of the head's group has; this waits for the device. Empty without a group."""
    if head.group is None:
        return []
    own = torch.full((1,), len(head.weight), device=head.weight.device)
    sizes: list[int] = gathered(own, head.group).flatten().tolist()
    return sizes


def _whole_rows(product: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the columns of all ranks of a group, which have so many each."""
    even = torch.nn.functional.pad(product, (0, max(sizes) - product.shape[1]))
    parts = gathered(even, group)
    return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)
