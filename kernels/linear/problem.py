"""The checked arguments of the operators on hidden states: three tensors that may get gradients, and a problem.

Letters: T rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.kernels.chunks import rows_per_chunk
from rlcore.kernels.dispatch import Query
from rlcore.kernels.operands import (
    check_flag,
    check_float,
    check_ignore_index,
    check_known_tokens,
    check_positive,
    check_same_device,
    check_shape,
    check_tensor,
    check_token_dtype,
    check_token_range,
    checked_targets,
    checked_temperature,
    is_checked_on_device,
)
from rlcore.kernels.row_stats import checked_row_stats
from rlcore.kernels.softmax_rows import ScaledRows, wide_dtype
from rlcore.kernels.vocab_shard import VocabularyShard, check_group
from rlcore.planned import planned_device, type_meant


class HeadInputs(NamedTuple):
    """The tensors that may get gradients, in the order in which every implementation takes and returns them."""

    hidden: Tensor
    """[T, H]"""
    weight: Tensor
    """[V, H]"""
    bias: Tensor | None
    """[V]"""


class FlatRows(NamedTuple):
    """Rows with leading dimensions such as [N, L], joined to one."""

    hidden: Tensor
    """[T, H]"""
    targets: Tensor
    """[T]"""
    temperature: float | Tensor
    """A number, or [T]."""

    @staticmethod
    def of(hidden: Tensor, targets: Tensor, temperature: float | Tensor) -> FlatRows:
        """Join the dimensions of the rows; the checks of what has but one are left to ``head_inputs``.

        Raises:
            InvalidInputError: targets or temperatures are not one for each row of [..., T, H] hidden states.
        """
        if not isinstance(hidden, Tensor) or hidden.dim() < 3:
            return FlatRows(hidden, targets, temperature)
        shape = tuple(hidden.shape[:-1])
        check_shape("targets", targets, shape, "one token for each row of hidden")
        if isinstance(temperature, Tensor):
            check_shape("temperature", temperature, shape, "a float, or one value for each target")
            temperature = temperature.flatten()
        return FlatRows(hidden.flatten(0, -2), targets.flatten(), temperature)


@dataclass(frozen=True, slots=True)
class LinearHeadProblem:
    """All other arguments. The public operators make and check it."""

    rows: ScaledRows
    softcap: float | None = None
    with_entropy: bool = False
    memory_budget_bytes: int | None = None
    shard: VocabularyShard | None = None
    """Given where the weight is this rank's part of the vocabulary."""
    row_stats: tuple[str, ...] = ()

    def check_tokens_late(self, vocab_size: int) -> None:
        """Check the targets where that is done on the device: after the large kernels, which small ones would delay."""
        if self.shard is None and is_checked_on_device(self.rows.labels):
            check_known_tokens(self.rows.target, vocab_size)

    def whole(self, inputs: HeadInputs) -> HeadInputs:
        """Return the inputs with the rows of all ranks, where each rank has a part of them."""
        return inputs if self.shard is None else inputs._replace(hidden=self.shard.all_rows(inputs.hidden))

    def chunk_rows(self, hidden_TH: Tensor, weight_VH: Tensor) -> int:
        """Return the rows of a chunk."""
        count = rows_per_chunk if self.shard is None else self.shard.rows_per_chunk
        return count(len(hidden_TH), len(weight_VH), wide_dtype(weight_VH.dtype).itemsize, self.memory_budget_bytes)

    def query(self, inputs: HeadInputs, *options: str) -> Query:
        """Return what the dispatcher decides on; ``options`` are features in use besides the problem's own."""
        flags = {
            "bias": inputs.bias is not None,
            "entropy": self.with_entropy,
            "softcap": self.softcap is not None,
            "memory_budget": self.memory_budget_bytes is not None,
            "group": self.shard is not None,
            "row_stats": bool(self.row_stats),
        }
        names = frozenset(name for name, is_used in flags.items() if is_used) | set(options)
        (vocab_size, hidden_size), device = inputs.weight.shape, inputs.hidden.device
        kind, planned = type_meant(device), planned_device(device)
        return Query(kind, inputs.hidden.dtype, int(hidden_size), int(vocab_size), names, planned)


def head_inputs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, group: dist.ProcessGroup | None
) -> HeadInputs:
    """Return the checked tensors: DTensors gathered, hidden and weight in the dtype in which they are multiplied.

    That is the one of ``torch.nn.functional.linear`` under autocast, and else the one to which torch promotes the two.

    Raises:
        InvalidInputError: a shape, dtype or device does not fit.
    """
    for name, tensor in {"hidden": hidden, "weight": weight}.items():
        check_tensor(name, tensor)
    if _is_dtensor(hidden):
        raise InvalidInputError("hidden is a DTensor; pass the rows of this rank: hidden.to_local()")
    check_group(group)
    if group is not None and _is_dtensor(weight):
        raise InvalidInputError("with group= weight must be this rank's rows; got a DTensor: pass weight.to_local()")
    inputs = _lowered(HeadInputs(hidden, weight, bias))
    hidden, weight, bias = inputs
    check_float("hidden", hidden)
    if hidden.dim() != 2:
        raise InvalidInputError(f"hidden must be [T, H] or [..., T, H]; got {list(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1] or (len(weight) == 0 and group is None):
        raise InvalidInputError(f"weight must be [V, H] with H = {hidden.shape[1]}; got {list(weight.shape)}")
    check_float("weight", weight)
    if not _is_split(hidden, targets, group):
        parts = "" if group is None else f", or of the equal parts that {group.size()} ranks have"
        check_shape("targets", targets, (len(hidden),), f"one token for each row of hidden{parts}")
    check_same_device("hidden", hidden.device, weight=weight, targets=targets, bias=bias)
    if bias is not None:
        check_float("bias", bias)
        check_shape("bias", bias, (len(weight),), "one value for each row of weight")
    if hidden.dtype == weight.dtype:  # in compiled code .to() is an operation, also to the same dtype
        return inputs
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    return HeadInputs(hidden.to(dtype), weight.to(dtype), bias)


def _is_split(hidden: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> bool:
    """Return True if each rank has an equal part of the rows. The lengths alone decide, so all ranks agree."""
    return group is not None and targets.dim() == 1 and len(targets) == len(hidden) * group.size() != len(hidden)


def _lowered(inputs: HeadInputs) -> HeadInputs:
    device_type = inputs.hidden.device.type
    is_lowered = torch.is_autocast_enabled(device_type) and inputs.hidden.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device_type) if is_lowered else None
    weight, bias = _whole("weight", inputs.weight, dtype), inputs.bias
    return HeadInputs(
        inputs.hidden if dtype is None else inputs.hidden.to(dtype),
        weight,
        None if bias is None else _whole("bias", bias, dtype),
    )


def _whole(name: str, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return ``x`` in ``dtype`` (None keeps its own), gathered if it is a DTensor."""
    if not _is_dtensor(x):
        return x if dtype is None else x.to(dtype)
    from rlcore.kernels.linear.sharded_weight import gathered

    return gathered(name, x, x.dtype if dtype is None else dtype)


def _is_dtensor(x: Tensor) -> bool:
    if type(x) in (Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor  # takes a second to import

    return isinstance(x, DTensor)


def linear_head_problem(
    inputs: HeadInputs,
    targets: Tensor,
    *,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
    with_entropy: bool,
    ignore_index: int,
    group: dist.ProcessGroup | None,
    memory_budget_bytes: int | None,
    row_stats: Sequence[str] = (),
) -> LinearHeadProblem:
    """Return the problem of scoring ``targets``.

    Raises:
        InvalidInputError: a value is outside of what ``linear_logprob`` accepts.
    """
    check_flag("with_entropy", with_entropy)
    check_ignore_index(ignore_index)
    names = checked_row_stats(row_stats)
    if softcap is not None:
        check_positive("softcap", softcap)
    check_positive("logit_scale", logit_scale)
    if memory_budget_bytes is not None:
        check_positive("memory_budget_bytes", memory_budget_bytes)
        memory_budget_bytes = int(memory_budget_bytes)
    temperature = checked_temperature(temperature, targets, ignore_index, wide_dtype(inputs.weight.dtype))
    vocab_size = len(inputs.weight)
    if group is None:
        check_token_dtype(targets)
        if not is_checked_on_device(targets):
            check_token_range(targets, vocab_size, ignore_index)
        rows = ScaledRows(targets.long(), ignore_index, logit_scale / temperature)
        return LinearHeadProblem(rows, softcap, with_entropy, memory_budget_bytes, row_stats=names)
    is_split = _is_split(inputs.hidden, targets, group)
    sizes = vocab_size, len(inputs.hidden)
    shard = VocabularyShard.of(group, *sizes, inputs.hidden.device, what="weight must be [V, H]", is_split=is_split)
    rows = ScaledRows(checked_targets(targets, shard.vocab_size, ignore_index), ignore_index, logit_scale / temperature)
    return LinearHeadProblem(shard.rows(rows, vocab_size), softcap, with_entropy, memory_budget_bytes, shard, names)
