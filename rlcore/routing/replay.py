"""Routing replay: the trainer sends each token to the experts that the sampler sent it to.

Two kernels round differently, and where two experts have almost the same score a token goes to another expert: its
log-probability changes far more than by rounding. With the sampler's experts only rounding is left (W. Ma et al.,
Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers, arXiv:2510.11370, 2025: R3).

Letters: T packed tokens, N sequences, L longest sequence or layers, K experts a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlcore.errors import InvalidInputError, RlcoreError
from rlcore.routing.routers import NO_ROUTE, ROUTES, Router, routers_of, selecting
from rlcore.routing.rows import rows_of


@contextlib.contextmanager
def replaying(routers: Sequence[Router], routes_TLK: Tensor | None, cu_seqlens: Tensor) -> Iterator[None]:
    """Inside, the routers of a model take these experts, in the forward pass and where it is computed again.

    Args:
        routes_TLK: of the packed tokens that the model computes; -1 lets the router select. None replays nothing.
        cu_seqlens: [N + 1], on the host: where the sequences begin, should they run padded.
    """
    if routes_TLK is None:
        yield
        return
    with selecting(routers, _Replay(routes_TLK, cu_seqlens)):
        yield


class _Replay:
    def __init__(self, routes_TLK: Tensor, cu_seqlens: Tensor) -> None:
        self._packed, self._cu_seqlens = routes_TLK, cu_seqlens
        self._by_rows: dict[int, Tensor] = {}

    def __call__(self, router: Router, selected_RK: Tensor) -> Tensor:
        route_RK = self._rows(len(selected_RK))[:, router.layer].to(selected_RK.dtype)
        return torch.where(route_RK == NO_ROUTE, selected_RK, route_RK)

    def _rows(self, count: int) -> Tensor:
        if count not in self._by_rows:
            found = rows_of(self._packed, self._cu_seqlens, count, fill=NO_ROUTE)
            if found is None:
                raise RlcoreError(f"a router has {count} rows, and the model computes {len(self._packed)} tokens")
            self._by_rows[count] = found
        return self._by_rows[count]


def check_routes(module: nn.Module, packed: Mapping[str, Tensor]) -> None:
    """Check the routes of a packed batch, if it has some, against the routers of the model that will replay them.

    Raises:
        InvalidInputError: the model has no routers, or others; says which value is wrong.
    """
    if ROUTES not in packed:
        return
    routes, routers = packed[ROUTES], routers_of(module)
    if not routers:
        raise InvalidInputError(
            f"the batch has {ROUTES}, and {type(module).__name__} has no router that could replay them; leave the "
            "entry out"
        )
    _, num_layers, top_k = routes.shape
    last = routers[-1]
    if num_layers <= last.layer or top_k != last.top_k:
        raise InvalidInputError(
            f"{ROUTES} has {num_layers} layers of {top_k} experts a token; {type(module).__name__} has a router in "
            f"layer {last.layer} that selects {last.top_k}: they are of another model"
        )
    for router in routers:
        _check_layer(routes[:, router.layer], router)


def _check_layer(route_TK: Tensor, router: Router) -> None:
    if not len(route_TK):
        return
    lowest, highest = (int(edge) for edge in route_TK.aminmax())
    if lowest < NO_ROUTE or highest >= router.num_experts:
        bad = lowest if lowest < NO_ROUTE else highest
        raise InvalidInputError(
            f"{ROUTES} of layer {router.layer} names expert {bad}; it has 0 to {router.num_experts - 1}, and "
            f"{NO_ROUTE} lets the router select"
        )
    if router.top_k > 1 and bool(((route_TK[:, 0] == route_TK[:, 1]) & (route_TK[:, 0] != NO_ROUTE)).any()):
        raise InvalidInputError(
            f"{ROUTES} of layer {router.layer} names one expert twice for a token: no sampler recorded this layer"
        )


def routes_of_sequence(routes: Tensor, num_tokens: int) -> Tensor:
    """Return the routes of so many tokens, [num_tokens, layers, K] int16; -1 for those behind ``routes``.

    A sampler has none of its last token, which it never ran.
    """
    given = routes[:num_tokens].to(torch.int16)
    return pad(given, (0, 0, 0, 0, 0, num_tokens - len(given)), value=NO_ROUTE)


def joined_routes(routes: Sequence[Tensor | None], shape: tuple[int, int]) -> Tensor | None:
    """Return the routes of several sequences padded on the right, [N, L, layers, K]; None if no sequence has any.

    Raises:
        InvalidInputError: they are of different models.
    """
    sizes = {tuple(one.shape[1:]) for one in routes if one is not None}
    if not sizes:
        return None
    if len(sizes) > 1:
        raise InvalidInputError(f"completions have {ROUTES} of different models: [layers, experts] are {sorted(sizes)}")
    joined = torch.full((*shape, *sizes.pop()), NO_ROUTE, dtype=torch.int16)
    for row, one in enumerate(routes):
        if one is not None:
            joined[row] = routes_of_sequence(one, shape[1])
    return joined
