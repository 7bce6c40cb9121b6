"""The checked arguments that an implementation of ``token_logprob`` takes besides the logits.

Letters: T rows, V vocabulary, N batch entries where the rows of the logits do not flatten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from rlcore.kernels.dispatch import Query
from rlcore.kernels.operands import check_flag, check_ignore_index, check_token_dtype, checked_temperature
from rlcore.kernels.softmax_rows import ScaledRows, wide_dtype


@dataclass(frozen=True, slots=True)
class LogitsProblem:
    """All arguments but the logits. The public operator makes and checks it."""

    rows: ScaledRows
    """Shaped like the targets."""
    keep_mask: Tensor | None = None
    """Shaped like the logits."""
    with_entropy: bool = False
    inplace_backward: bool = False

    def query(self, logits: Tensor) -> Query:
        """Return what the dispatcher decides on."""
        flags = {
            "entropy": self.with_entropy,
            "keep_mask": self.keep_mask is not None,
            "inplace_backward": self.inplace_backward,
        }
        options = frozenset(name for name, is_used in flags.items() if is_used)
        return Query(logits.device.type, logits.dtype, 0, int(logits.shape[-1]), options)

    def reshaped(self, shape: Sequence[int]) -> LogitsProblem:
        """Return the same problem with targets of this shape."""
        keep_mask = None if self.keep_mask is None else self.keep_mask.reshape(*shape, self.keep_mask.shape[-1])
        return replace(self, rows=self.rows.reshaped(shape), keep_mask=keep_mask)


def logits_problem(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor,
    with_entropy: bool,
    ignore_index: int,
    keep_mask: Tensor | None,
    inplace_backward: bool,
) -> tuple[Tensor, LogitsProblem]:
    """Return the logits as [T, V] or [N, L, V], and the problem of scoring ``targets``.

    It does not check that the targets are tokens below V.

    Raises:
        InvalidInputError: a temperature, a flag, the dtype of the targets, or the ``ignore_index``.
    """
    check_flag("with_entropy", with_entropy)
    check_flag("inplace_backward", inplace_backward)
    check_ignore_index(ignore_index)
    temperature = checked_temperature(temperature, targets, ignore_index, wide_dtype(logits.dtype))
    check_token_dtype(targets)
    problem = LogitsProblem(
        ScaledRows(targets, ignore_index, 1 / temperature), keep_mask, with_entropy, inplace_backward
    )
    if logits.dim() > 2:
        logits = _joined(logits)
        problem = problem.reshaped(logits.shape[:-1])
    return logits, problem


def _joined(logits: Tensor) -> Tensor:
    """Return [T, V] where strides allow a view, else [N, L, V], as for logits[:, :-1]."""
    try:
        return logits.view(-1, logits.shape[-1])
    except RuntimeError:  # the only way in which torch says that the strides do not allow it
        return logits.reshape(-1, *logits.shape[-2:])
