"""A vocabulary split over a process group: the statistics that the ranks gather, and how they merge them.

Each rank has some of the tokens, any number of them, in the order of the ranks: columns of the logits, or rows of the
weight. The ranks have the same rows of logits or of hidden states, or each an equal part of the hidden states. s is the
inverse temperature and y the target. From its part r of the logits z a rank computes, with c = s (z - m_r),

    m_r = max z      a_r = sum exp(c)      z_y, or -inf if the target is elsewhere      d_r = sum exp(c) c

and for ``row_stats`` sum exp(c)^2, sum z, and 1 if the target is here and the first of this rank's largest logits.

All ranks gather these and merge them in the same order, so that all get the same numbers:

    m = max_r m_r      f_r = s (m_r - m)      a = sum_r exp(f_r) a_r      d = sum_r exp(f_r) (d_r + f_r a_r)
    logprob = s (z_y - m) - ln a      entropy = ln a - d / a      p_v = exp(c_v) / (exp(-f_r) a)

Letters: T rows, V vocabulary of this rank, G ranks, S statistics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlcore.errors import InvalidInputError
from rlcore.kernels.chunks import even_rows, fitting_rows
from rlcore.kernels.operands import is_checked_on_device
from rlcore.kernels.softmax_rows import RowStatistics, ScaledRows, exponentials_

_ROWS = 1024
"""Rows of a chunk where the caller gives no memory budget: the same on all ranks, whatever their part is."""
_IGNORED = -1
"""The caller's own ``ignore_index`` cannot be kept: here it may be the number of a row of this rank's weight."""


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This rank's part of the vocabulary. Its numbers stay on the device, so that nothing waits for them."""

    group: dist.ProcessGroup
    first: Tensor
    """[] id of the part's first token."""
    vocab_size: Tensor
    """[] number of tokens of all parts."""
    own_rows: slice | None = None
    """This rank's rows of the hidden states where they are split (sequence parallelism)."""

    @staticmethod
    def of(
        group: dist.ProcessGroup,
        vocab_size: int,
        num_rows: int,
        device: torch.device,
        *,
        what: str,
        is_split: bool = False,
    ) -> VocabularyShard:
        """Make the shard; all ranks call it together.

        Args:
            vocab_size: the number of this rank's tokens.
            num_rows: of this rank's logits or hidden states.
            what: the tensor of all tokens and its shape, for an error.
            is_split: each rank has an equal part of the rows.

        Raises:
            InvalidInputError: on the CPU and with RLCORE_DEBUG=1 (elsewhere collectives fail or hang): ranks have
                different numbers of rows, or none has a token.
        """
        sizes = [torch.full((1,), size, device=device) for size in (vocab_size, num_rows)]
        sizes_G2 = gathered(torch.cat(sizes), group)
        if not is_checked_on_device(sizes_G2):
            vocab_sizes, numbers = sizes_G2.T.tolist()
            if len(set(numbers)) > 1:
                raise InvalidInputError(f"ranks of group must score the same rows; they have {numbers}, by rank")
            if not any(vocab_sizes):
                raise InvalidInputError(f"{what} with V > 0 on some rank of group; it is 0 on all")
        own_rows = slice(group.rank() * num_rows, (group.rank() + 1) * num_rows) if is_split else None
        return VocabularyShard(group, sizes_G2[: group.rank(), 0].sum(), sizes_G2[:, 0].sum(), own_rows)

    def rows(self, rows: ScaledRows, vocab_size: int) -> ScaledRows:
        """Return ``rows`` with targets that are numbers of this rank's tokens."""
        target_T = rows.target - self.first
        is_elsewhere_T = (target_T < 0) | (target_T >= vocab_size)
        labels_T = target_T.masked_fill(is_elsewhere_T, 0).masked_fill(rows.ignored, _IGNORED)
        return replace(rows, labels=labels_T, ignore_index=_IGNORED, is_elsewhere=is_elsewhere_T)

    def rows_per_chunk(self, num_rows: int, vocab_size: int, itemsize: int, budget_bytes: int | None) -> int:
        """Return the rows of a chunk, the same on every rank. With a budget, this waits for the device.

        Raises:
            InvalidInputError: on every rank, if the budget does not hold one row on one of them.
        """
        if budget_bytes is None:
            return even_rows(num_rows, _ROWS)
        fitting = torch.tensor(fitting_rows(vocab_size, itemsize, budget_bytes), device=self.first.device)
        dist.all_reduce(fitting, dist.ReduceOp.MIN, group=self.group)
        if fitting == 0:
            raise InvalidInputError(
                f"memory_budget_bytes={budget_bytes} does not hold one row of the logits of every rank of group; "
                f"this one holds {vocab_size} tokens"
            )
        return even_rows(num_rows, int(fitting))

    def merged(self, parts_TS: Tensor, rows: ScaledRows, *, row_stats: Sequence[str] = ()) -> RowStatistics:
        """Return the statistics of whole rows from this rank's ``partial_statistics_``.

        ``total`` and ``peak`` are those that belong to this rank's exponentials.
        """
        parts_GTS = gathered(parts_TS, self.group)
        peak_GT, total_GT, chosen_GT, *others_GT = parts_GTS.unbind(2)
        count = len(others_GT) - len(row_stats)
        moment_GT, numbers_GT = others_GT[:count], others_GT[count:]
        peak_T = peak_GT.amax(0)
        shift_GT = (peak_GT - peak_T) * rows.inverse_temperature
        scale_GT = shift_GT.exp()
        total_T = (scale_GT * total_GT).sum(0)
        log_total_T = total_T.log()
        logprob_T = (chosen_GT.amax(0) - peak_T) * rows.inverse_temperature - log_total_T
        entropy_T = None
        if moment_GT:
            # A part whose columns are all -inf has no weight, and an infinite shift.
            shifted_GT = (moment_GT[0] + shift_GT * total_GT).masked_fill(total_GT == 0, 0.0)
            entropy_T = log_total_T - (scale_GT * shifted_GT).sum(0) / total_T
        here = self.group.rank()
        of_whole_rows = {
            "sum_squares": lambda x_GT: (scale_GT.square() * x_GT).sum(0) / total_T.square(),
            "mean_logit": lambda x_GT: x_GT.sum(0) / self.vocab_size * rows.inverse_temperature,
            "is_top1": lambda x_GT: x_GT.gather(0, peak_GT.argmax(0)[None]).squeeze(0) > 0,
        }
        numbers = {name: of_whole_rows[name](x_GT) for name, x_GT in zip(row_stats, numbers_GT, strict=True)}
        return RowStatistics(logprob_T, entropy_T, _reference(peak_GT[here]), total_T / scale_GT[here], numbers)

    def all_rows(self, hidden_TH: Tensor) -> Tensor:
        """Return the hidden states of all ranks, where each has a part of them.

        The gradient of the result must be complete in this rank's own part.
        """
        if self.own_rows is None:
            return hidden_TH
        whole: Tensor = _AllRows.apply(hidden_TH, self)  # type: ignore[no-untyped-call]
        return whole

    def start_sums(self, partial_TH: Tensor, rows: slice) -> list[dist.Work]:
        """Start to sum ``rows`` of ``partial_TH``, dense, over the ranks, in place; wait for the work before reading.

        Where the rows are split, each sum goes only to the rank that has them, as in a reduce-scatter.
        """
        if self.own_rows is None:
            return [dist.all_reduce(partial_TH[rows], group=self.group, async_op=True)]
        each = self.own_rows.stop - self.own_rows.start
        owners = range(rows.start // each, math.ceil(rows.stop / each))
        parts = (slice(max(rows.start, owner * each), min(rows.stop, (owner + 1) * each)) for owner in owners)
        return [
            dist.reduce(partial_TH[part], group=self.group, group_dst=owner, async_op=True)
            for owner, part in zip(owners, parts, strict=True)
        ]


def check_group(group: object) -> None:
    """Refuse what is no process group, such as a mesh."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise InvalidInputError(
            f"group must be a torch.distributed.ProcessGroup that this rank is in; got {type(group).__name__}. "
            "Of a DeviceMesh it is mesh.get_group(dim)"
        )


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, shard: VocabularyShard) -> Tensor:
        ctx.own_rows = shard.own_rows
        return gathered(hidden_TH, shard.group).flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_TH: Tensor) -> tuple[Tensor, None]:
        return g_TH[ctx.own_rows].clone(), None  # a view would keep the memory of the other ranks' rows


def num_statistics(*, with_entropy: bool, row_stats: Sequence[str] = ()) -> int:
    """Return S."""
    return 3 + with_entropy + len(row_stats)


def partial_statistics_(
    logits_TV: Tensor, rows: ScaledRows, *, with_entropy: bool, row_stats: Sequence[str] = ()
) -> Tensor:
    """Return [T, S]: m, a, z_y, with entropy d, and ``row_stats`` of this rank's logits; overwrite them with exp(c)."""
    if not logits_TV.shape[1]:
        others = num_statistics(with_entropy=with_entropy, row_stats=row_stats) - 3
        nothing = (-math.inf, 0.0, -math.inf, *[0.0] * others)
        return torch.stack([logits_TV.new_full((len(logits_TV),), value) for value in nothing], 1)
    peak_T = logits_TV.amax(1)
    chosen_T = logits_TV.gather(1, rows.target[:, None]).squeeze(1)
    if rows.is_elsewhere is not None:
        chosen_T = chosen_T.masked_fill(rows.is_elsewhere, -math.inf)
    numbers: dict[str, Tensor] = {}
    if "mean_logit" in row_stats:
        numbers["mean_logit"] = logits_TV.sum(1)
    if "is_top1" in row_stats:
        is_first_T = logits_TV.argmax(1) == rows.target
        is_first_T = is_first_T if rows.is_elsewhere is None else is_first_T & ~rows.is_elsewhere
        numbers["is_top1"] = is_first_T.to(logits_TV.dtype)
    exp_TV = exponentials_(logits_TV, _reference(peak_T), rows.inverse_temperature)
    parts = [peak_T, exp_TV.sum(1), chosen_T]
    if with_entropy:
        parts.append(torch.xlogy(exp_TV, exp_TV).sum(1))
    if "sum_squares" in row_stats:
        numbers["sum_squares"] = exp_TV.square().sum(1)
    return torch.stack([*parts, *(numbers[name] for name in row_stats)], 1)


def _reference(peak_T: Tensor) -> Tensor:
    """Return what is subtracted from logits: a peak of -inf becomes 0, as -inf minus -inf would be NaN."""
    return peak_T.masked_fill(peak_T == -math.inf, 0.0)


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [G, ...]: ``x`` of every rank."""
    parts = x.new_empty((group.size(), *x.shape))
    dist.all_gather([*parts.unbind()], x.contiguous(), group=group)
    return parts
