"""The tokens that each expert of a model computes, counted while it runs.

Most experts of transformers are called alike, by ``experts(hidden_states, top_k_index, top_k_weights)``. So what is
counted is what they compute, whether the router selected it or a replay.

Letters: T packed tokens, R rows, E experts, K experts a row, L layers with experts.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore.logit_form import answering
from rlcore.routing.routers import Router
from rlcore.routing.rows import rows_of

_SELECTED = ("top_k_index", "selected_experts", "router_indices")
"""Names that transformers' experts have for their second argument, the experts of each row [R, K]."""


def can_count(router: Router) -> bool:
    """Return True if the experts of this router are told which of them each row has."""
    return _takes_selected(type(router.experts).forward)


@functools.cache
def _takes_selected(forward: Callable[..., Any]) -> bool:
    names = list(inspect.signature(forward).parameters)
    return len(names) > 2 and names[2] in _SELECTED  # after self and the rows


@contextlib.contextmanager
def counting(routers: Sequence[Router], counts_LE: Tensor, is_counted_T: Tensor, cu_seqlens: Tensor) -> Iterator[None]:
    """Inside, add to ``counts_LE`` the tokens that each expert is given, also where a block is computed again.

    Args:
        routers: L, all of which ``can_count``.
        counts_LE: int64.
        is_counted_T: int64, 1 for each of the packed tokens that counts, or else 0.
        cu_seqlens: [N + 1], on the host: where the sequences begin, should they run padded.
    """
    number = next(_numbers)
    _open[number] = counts_LE
    try:
        with contextlib.ExitStack() as stack:
            for row, router in enumerate(routers):
                count = _Count(torch.tensor([number, row], device="cpu"), is_counted_T, cu_seqlens)
                stack.enter_context(answering(router.experts, _counting(router.experts.forward, count)))
            yield
    finally:
        del _open[number]


class _Count(NamedTuple):
    """The arguments of ``count_rows`` for one router."""

    place: Tensor
    """On the host: the number of the open counts, and the row of the router in them."""
    is_counted_T: Tensor
    cu_seqlens: Tensor


def _counting(forward: Callable[..., Any], count: _Count) -> Callable[..., Any]:
    @functools.wraps(forward)
    def counting_forward(hidden_states: Tensor, selected_RK: Tensor, *others: Any) -> Any:
        if torch.compiler.is_compiling():
            selected_RK = _counted(selected_RK, *count)
        else:
            count_rows(selected_RK, *count)
        return forward(hidden_states, selected_RK, *others)

    return counting_forward


_numbers = itertools.count()
_open: dict[int, Tensor] = {}
"""Counts by number, which is what an operator can be given. Were the counts themselves an argument, autograd would find
them changed where compiled code computes a block again."""


def count_rows(selected_RK: Tensor, place: Tensor, is_counted_T: Tensor, cu_seqlens: Tensor) -> None:
    """Count the rows of each expert, without a wait for the device; none where it is not known which are tokens."""
    number, row = place.tolist()
    is_counted_R = rows_of(is_counted_T, cu_seqlens, len(selected_RK), fill=0)
    if is_counted_R is None:
        return
    counts_E = _open[number][row]
    expert_RK = selected_RK.clamp(0, len(counts_E) - 1)
    is_expert_RK = (selected_RK == expert_RK) & (counts_E[expert_RK] >= 0)  # LongCat's others compute nothing
    counts_E.index_add_(0, expert_RK.flatten(), (is_counted_R[:, None] * is_expert_RK).flatten())


@torch.library.custom_op("rlcore::count_experts", mutates_args=())
def _counted(selected_RK: Tensor, place: Tensor, is_counted_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the same selection, counted. To the compiler it is one operator: no graph breaks at it."""
    count_rows(selected_RK, place, is_counted_T, cu_seqlens)
    return selected_RK.clone()


@_counted.register_fake
def _(selected_RK: Tensor, place: Tensor, is_counted_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    return torch.empty_like(selected_RK, memory_format=torch.contiguous_format)
