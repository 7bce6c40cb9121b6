"""The tokens that each expert of a model computes, counted while it runs.

Most experts of transformers are called alike, by ``experts(hidden_states, top_k_index, top_k_weights)``. So what is
counted is what they compute, whether the router selected it or a replay.

Letters: T packed tokens, R rows, E experts, K experts a row, L layers with experts.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore.logit_form import answering
from rlcore.routing.routers import Router
from rlcore.routing.rows import rows_of

_SELECTED = ("top_k_index", "selected_experts", "router_indices")
"""Names that transformers' experts have for their second argument, the experts of each row [R, K]."""


def can_count(router: Router) -> bool:
    """Return True if the experts of this router are told which of them each row has."""
    names = list(inspect.signature(type(router.experts).forward).parameters)
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
    with contextlib.ExitStack() as stack:
        for router, counts_E in zip(routers, counts_LE.unbind(), strict=True):
            count = functools.partial(_count, counts_E, is_counted_T, cu_seqlens)
            stack.enter_context(answering(router.experts, _counting(router.experts.forward, count)))
        yield


def _counting(forward: Callable[..., Any], count: Callable[[Tensor], None]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def counting_forward(hidden_states: Tensor, selected_RK: Tensor, *others: Any) -> Any:
        count(selected_RK)
        return forward(hidden_states, selected_RK, *others)

    return counting_forward


def count_rows(counts_E: Tensor, is_counted_T: Tensor, cu_seqlens: Tensor, selected_RK: Tensor) -> None:
    """Count the rows of each expert, without a wait for the device."""
    is_counted_R = rows_of(is_counted_T, cu_seqlens.diff().tolist(), len(selected_RK), fill=0)
    counts_E.index_add_(0, selected_RK.flatten(), is_counted_R[:, None].expand_as(selected_RK).flatten())


_count = torch.library.custom_op("rlcore::count_experts", count_rows, mutates_args=("counts_E",))
"""To the compiler it is one operator: no graph breaks at it."""
