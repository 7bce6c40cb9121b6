"""The experts that a transformers model selects, read while it runs.

Letters: R rows, K experts a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlcore.errors import UnsupportedError
from rlcore.routing.routers import Router, routers_of, selecting

T = TypeVar("T")


class RouteRecorder:
    """Runs a model and keeps the experts of every row.

    Args:
        module: a model of transformers; its ``config`` says how many layers it has.

    Raises:
        UnsupportedError: it has no router that could be read.
    """

    def __init__(self, module: Any) -> None:
        self._module, self._routers = module, routers_of(module)
        if not self._routers:
            raise UnsupportedError(
                f"returning the routed experts of {type(module).__name__}", "it has no router; build without the option"
            )
        self.shape = module.config.get_text_config().num_hidden_layers, self._routers[-1].top_k
        """[layers, K], the shape of a row's routes; layers without a router have 0."""

    def run(self, **inputs: Any) -> tuple[Any, Tensor]:
        """Return the model's output, and the experts [R, layers, K] int16 of its rows."""
        return self.during(lambda: self._module(**inputs))

    def during(self, compute: Callable[[], T]) -> tuple[T, Tensor]:
        """Return ``compute()``, which runs the model once, and the experts [R, layers, K] int16 of its rows."""
        found: dict[int, Tensor] = {}

        def keep(router: Router, selected_RK: Tensor) -> Tensor:
            found[router.layer] = selected_RK
            return selected_RK

        with selecting(self._routers, keep):
            output = compute()
        some = next(iter(found.values()))
        routes = torch.zeros(len(some), *self.shape, dtype=torch.int16, device=some.device)
        for layer, selected_RK in found.items():
            routes[:, layer] = selected_RK.to(torch.int16)
        return output, routes
