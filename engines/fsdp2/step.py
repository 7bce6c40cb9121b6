"""One optimizer step, and scoring, over micro-batches of a packed batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from rlcore.device import Device
from rlcore.engines.checkpoints.train_state import optimizers_of, schedulers_of
from rlcore.engines.fsdp2.micro_batch import MicroBatch, Share, micro_batches, on_device
from rlcore.engines.fsdp2.sharding import leaving_it_sharded, num_gradient_parts, sync_gradients, total_norm
from rlcore.errors import InvalidInputError, RlcoreError, StateError
from rlcore.kernels.linear.logprob import linear_logprob
from rlcore.kernels.linear.loss import linear_loss
from rlcore.kernels.losses.interface import LossOutput
from rlcore.kernels.token.logprob import token_logprob
from rlcore.kernels.token.nucleus import keep_mask
from rlcore.nn import TrainModule
from rlcore.weights.shards import local_part

WEIGHT = "token_weight"
"""Carried beside the batch's own entries: the token's share of the loss of the whole batch."""
SCORED = "is_scored"
"""Carried beside the batch's own entries: whether the token counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """How the loss of a batch is computed."""

    max_tokens_per_micro_batch: int
    temperature: float
    with_entropy: bool

    def __post_init__(self) -> None:
        _check_max_tokens(self.max_tokens_per_micro_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions(LossOptions):
    """How ``train_batch`` runs."""

    max_grad_norm: float | None

    def __post_init__(self) -> None:
        LossOptions.__post_init__(self)  # with slots, super() is of the class before they were added
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise InvalidInputError(f"max_grad_norm must be above 0, or None for no limit, got {self.max_grad_norm!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """Which distribution ``forward_logprobs`` speaks of."""

    max_tokens_per_micro_batch: int
    temperature: float
    top_p: float
    top_k: int

    def __post_init__(self) -> None:
        _check_max_tokens(self.max_tokens_per_micro_batch)


def _check_max_tokens(value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise InvalidInputError(f"max_tokens_per_micro_batch must be a whole number of at least 1, got {value!r}")


def train_step(
    module: TrainModule,
    device: Device,
    share: Share,
    loss_fn: Callable[..., Any],
    *,
    options: StepOptions,
    reduce_each: bool = False,
) -> dict[str, float]:
    """Gradients of the whole batch, clipping, one step of every optimizer and scheduler; then zero gradients.

    All workers do this together, each on its share; gradients are exchanged after the last micro-batch, or after each.

    Args:
        device: of rlcore; its profiler marks the phases.
    """
    optimizers = optimizers_of(module)
    if not optimizers:
        raise StateError(
            f"train_batch needs an optimizer, and {type(module).__name__} has none; "
            "set one as an attribute in on_weights_materialized(), such as self.optimizer = torch.optim.AdamW(...)"
        )
    phase = device.profiler.range
    try:
        with leaving_it_sharded(module):
            metrics = _accumulate(module, device, share, loss_fn, options, reduce_each=reduce_each)
        with phase("train_batch: clip"):
            gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            norm = total_norm(gradients)
        with phase("train_batch: metrics"):
            read = _begin_reading(metrics.joined() | {"grad_norm": norm}, device)
        with phase("train_batch: optimizer"):
            _clip_and_step(optimizers.values(), gradients, norm, options.max_grad_norm)
    finally:
        module.zero_grad()  # also of parameters that no optimizer has, which would count in the next norm
        for optimizer in optimizers.values():
            optimizer.zero_grad()
    rates = {f"lr/{name}": optimizer.param_groups[0]["lr"] for name, optimizer in optimizers.items()}
    found = read() | rates
    if not math.isfinite(found["grad_norm"]):
        raise RlcoreError(
            f"the gradient norm of this batch is {found['grad_norm']}: no step was taken and the gradients were "
            "dropped. Look at the batch's values and at the loss function"
        )
    for scheduler in schedulers_of(module).values():
        scheduler.step()
    return found


def _begin_reading(numbers: Mapping[str, Tensor], device: Device) -> Callable[[], dict[str, float]]:
    """Copy them to the host; what is returned waits for that alone. The optimizer's kernels, queued afterwards, run
    while the host takes up the next batch."""
    values = torch.stack([number.float() for number in numbers.values()]).to("cpu", non_blocking=True)
    arrived = device.streams.event()
    arrived.record()

    def read() -> dict[str, float]:
        arrived.synchronize()
        return dict(zip(numbers, values.tolist(), strict=True))

    return read


def _clip_and_step(
    optimizers: Collection[Optimizer], gradients: Sequence[Tensor], norm: Tensor, max_norm: float | None
) -> None:
    """Not at all where the norm is not finite. Fused optimizers scale gradients as they read them and ask the device
    whether to step, as torch's GradScaler has them do; others take one more pass over the gradients and make the host
    wait."""
    is_finite = torch.isfinite(norm)
    divisor = None if max_norm is None else ((norm + _NORM_EPS) / max_norm).clamp(min=1.0).float()
    if not all(map(_asks_the_device, optimizers)):
        if not is_finite:
            return
        if divisor is not None:
            torch._foreach_div_([local_part(gradient) for gradient in gradients], divisor)
        for optimizer in optimizers:
            optimizer.step()
        return
    for optimizer in optimizers:
        asking: Any = optimizer
        asking.grad_scale, asking.found_inf = divisor, (~is_finite).float()
        try:
            optimizer.step()
        finally:
            del asking.grad_scale, asking.found_inf


def _asks_the_device(optimizer: Optimizer) -> bool:
    """SGD takes memory for its momentum as it finds it, which a first step that is not taken would leave so."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not isinstance(optimizer, torch.optim.SGD)


_NORM_EPS = 1e-6
"""Of ``torch.nn.utils.clip_grads_with_norm_``."""


def _accumulate(
    module: TrainModule,
    device: Device,
    share: Share,
    loss_fn: Callable[..., Any],
    options: StepOptions,
    *,
    reduce_each: bool,
) -> _Metrics:
    metrics, phase = _Metrics(), device.profiler.range
    for number, part in enumerate(_weighted_parts(share, options, device), start=1):
        sync_gradients(module, reduce_each or number == share.num_micro_batches)
        with phase("train_batch: forward and loss"):
            output, weight = _loss(module, part, loss_fn, options)
        with phase("train_batch: backward"):
            (output.loss * num_gradient_parts(module)).backward()  # type: ignore[no-untyped-call]
        metrics.add(output.loss.detach(), output.stats, weight)
    return metrics


def _weighted_parts(share: Share, options: LossOptions, device: Device) -> Iterator[MicroBatch]:
    scored_T = share.packed[WEIGHT] != 0
    return micro_batches(share, scored_T, options.max_tokens_per_micro_batch, device.torch_device)


def _loss(
    module: TrainModule, part: MicroBatch, loss_fn: Callable[..., Any], options: LossOptions
) -> tuple[LossOutput, Tensor]:
    """And the weight of the micro-batch."""
    per_token = dict(part.per_token)
    weight_R = per_token.pop(WEIGHT)
    hidden_TH = module.hidden_states(part.tokens)
    head = module.output_head()  # by now gathered, if it is sharded
    output = linear_loss(
        hidden_TH[part.rows_R],
        head.weight,
        part.targets_R,
        loss_fn,
        per_token=per_token,
        token_weight=weight_R,
        cu_seqlens=part.cu_rows,
        with_entropy=options.with_entropy,
        bias=head.bias,
        temperature=options.temperature,
        softcap=head.softcap,
        logit_scale=head.logit_scale,
    )
    return output, weight_R.sum()


@torch.no_grad()
def evaluate(
    module: TrainModule, device: Device, share: Share, loss_fn: Callable[..., Any], options: LossOptions
) -> dict[str, float]:
    """The loss and statistics that ``train_step`` would give in evaluation mode; nothing changes."""
    metrics = _Metrics()
    with _evaluating(module):
        for part in _weighted_parts(share, options, device):
            with device.profiler.range("eval_batch: forward and loss"):
                output, weight = _loss(module, part, loss_fn, options)
            metrics.add(output.loss, output.stats, weight)
    return _begin_reading(metrics.joined(), device)()


@contextmanager
def _evaluating(module: TrainModule) -> Iterator[None]:
    """In evaluation mode, each part as it was afterwards, and nothing gathered."""
    were_training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        with leaving_it_sharded(module):
            yield
    finally:
        for part in were_training:
            part.training = True


class _Metrics:
    """Statistics of micro-batches joined by suffix, on the device until the end: no host sync on the way."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._stats: list[Mapping[str, Tensor]] = []
        self._weights: list[Tensor] = []

    def add(self, loss: Tensor, stats: Mapping[str, Tensor], weight: Tensor) -> None:
        self._losses.append(loss)
        self._stats.append(stats)
        self._weights.append(weight)

    def joined(self) -> dict[str, Tensor]:
        """Of the micro-batches of all workers."""
        names = ["loss", "weight", *self._stats[0]]
        rows = zip(self._losses, self._weights, self._stats, strict=True)
        table = torch.stack([torch.stack([x.float() for x in (loss, w, *stats.values())]) for loss, w, stats in rows])
        columns = dict(zip(names, _of_all_workers(table).unbind(1), strict=True))
        loss, weight = columns.pop("loss").sum(), columns.pop("weight")
        share = weight / weight.sum().clamp(min=torch.finfo(weight.dtype).tiny)
        return {"loss": loss} | {name: _join(name, values, share) for name, values in columns.items()}


def _of_all_workers(rows: Tensor) -> Tensor:
    """The rows [M, K] of every worker, one after the other."""
    if _num_workers() == 1:
        return rows
    gathered = [torch.empty_like(rows) for _ in range(_num_workers())]
    dist.all_gather(gathered, rows)
    return torch.cat(gathered)


def _num_workers() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _join(name: str, values: Tensor, share: Tensor) -> Tensor:
    if name.endswith("_mean"):
        # an empty micro-batch has share 0 and an undefined mean
        return torch.where(share > 0, values * share, 0.0).sum()
    if name.endswith("_sum"):
        return values.sum()
    return values.max() if name.endswith("_max") else values.min()


@torch.no_grad()
def score(module: TrainModule, device: Device, share: Share, options: ScoreOptions) -> Tensor:
    """Log-probability [T] float32, on the host, of every marked token of the whole batch; 0 elsewhere."""
    place = device.torch_device
    logprob_T = torch.zeros(share.num_tokens, device=place)
    with _evaluating(module):
        for part in micro_batches(share, share.packed[SCORED], options.max_tokens_per_micro_batch, place):
            with device.profiler.range("forward_logprobs: forward"):
                (position_R,) = on_device([share.positions_T[part.positions_R]], place)
                logprob_T[position_R] = _logprobs(module, part, options).float()
    if _num_workers() > 1:
        dist.all_reduce(logprob_T)  # each token is scored by one worker, and 0 on the others
    return logprob_T.cpu()


def _logprobs(module: TrainModule, part: MicroBatch, options: ScoreOptions) -> Tensor:
    hidden_RH = module.hidden_states(part.tokens)[part.rows_R]
    head = module.output_head()
    if options.top_p == 1 and options.top_k <= 0:
        return linear_logprob(
            hidden_RH,
            head.weight,
            part.targets_R,
            bias=head.bias,
            temperature=options.temperature,
            softcap=head.softcap,
            logit_scale=head.logit_scale,
        ).logprob
    return torch.cat([*_restricted(hidden_RH, part.targets_R, head, options), hidden_RH.new_zeros(0)])


_ROWS = 1024  # rows whose whole logits top-p and top-k have to see at once


def _restricted(hidden_RH: Tensor, targets_R: Tensor, head: Any, options: ScoreOptions) -> Iterator[Tensor]:
    for hidden, targets in zip(torch.split(hidden_RH, _ROWS), torch.split(targets_R, _ROWS), strict=True):
        logits = torch.nn.functional.linear(hidden, head.weight, head.bias).float()
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        logits = logits * head.logit_scale
        keep = keep_mask(logits, temperature=options.temperature, top_p=options.top_p, top_k=options.top_k)
        yield token_logprob(logits, targets, temperature=options.temperature, keep_mask=keep).logprob
