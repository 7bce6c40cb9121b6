"""Numbers of a row that log-probability operators compute where they have its logits anyway: ``row_stats=``.

    sum_squares = sum_v p_v^2      mean_logit = (1/V) sum_v s_v      is_top1 = [y = argmax_v s_v]

s are the logits after softcap, scale and temperature, p is their softmax and y the target. Of equal logits the first is
the largest. A logit of -inf has no probability, and makes the mean -inf. They are numbers to report, or to weight with,
and have no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from rlcore.errors import InvalidInputError, UnsupportedError

ROW_STATS = ("sum_squares", "mean_logit", "is_top1")


def checked_row_stats(row_stats: object) -> tuple[str, ...]:
    """Return the names.

    Raises:
        InvalidInputError: they are no names of ``ROW_STATS``, or one is there twice.
    """
    names = tuple(row_stats) if isinstance(row_stats, Iterable) and not isinstance(row_stats, str) else None
    if names is None or any(name not in ROW_STATS for name in names) or len(set(names)) < len(names):
        raise InvalidInputError(
            f"row_stats must be a sequence of different names among {', '.join(ROW_STATS)}; got {row_stats!r}"
        )
    return names


def row_stats_in_order(found: Mapping[str, Tensor], names: Sequence[str]) -> list[Tensor]:
    """Return the numbers of an implementation in the order in which they were asked for.

    Raises:
        UnsupportedError: it left one out.
    """
    missing = [name for name in names if name not in found]
    if missing:
        raise UnsupportedError(
            f"row_stats={tuple(names)!r}",
            f"the implementation that was chosen returned no {', '.join(missing)}; its predicate should refuse the "
            "option 'row_stats', or implementation= name another",
        )
    return [found[name] for name in names]


def row_stats_dtype(name: str, wide: torch.dtype) -> torch.dtype:
    """Return the dtype of a number whose rows have softmaxes in ``wide``."""
    return torch.bool if name == "is_top1" else wide
