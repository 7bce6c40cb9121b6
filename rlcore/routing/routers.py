"""The routers of a mixture of experts, and the one place where the experts that they select can be read or replaced.

Every router of transformers selects by ``torch.topk`` over one score for each expert, and computes the weights of the
selected experts from its own scores afterwards. So the selection alone is replaced here: weights, and the gradient
through them, stay the router's.

Letters: R rows of a router, E experts, K experts that a row selects.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlcore.errors import UnsupportedError
from rlcore.logit_form import answering

ROUTES = "routed_experts"
"""The entry of a batch and of a completion: the experts of each token, [tokens, layers, K]; vLLM's name."""
NO_ROUTE = -1
"""In place of an expert: none is known for this token, and the router selects by itself."""
_NAMES = ("gate", "router")
_TOP_K = (torch.topk, Tensor.topk)

Select = Callable[["Router", Tensor], Tensor]
"""``(router, selected [R, K])`` returns the experts to take instead, [R, K]."""


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """One router of a model."""

    name: str
    layer: int
    """The index of its layer, counted over all layers of the model."""
    module: nn.Module
    """The module whose forward selects."""
    num_experts: int
    top_k: int
    experts: nn.Module
    """The module that computes the experts."""


def routers_of(module: nn.Module) -> list[Router]:
    """Return the routers of a transformers model, by layer; none of a dense model."""
    found = (_router(name, block) for name, block in module.named_modules() if hasattr(block, "experts"))
    return sorted((router for router in found if router is not None), key=lambda router: router.layer)


def _router(name: str, block: Any) -> Router | None:
    own = (getattr(block, child, None) for child in _NAMES)
    module = next((one for one in own if isinstance(one, nn.Module) and hasattr(one, "top_k")), block)
    top_k = getattr(module, "top_k", None)
    num_experts = getattr(module, "num_experts", None) or getattr(block.experts, "num_experts", None)
    numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", f".{name}")
    if not isinstance(top_k, int) or not isinstance(num_experts, int) or not numbers:
        return None
    return Router(name, int(numbers[-1]), module, num_experts, top_k, block.experts)


@contextlib.contextmanager
def selecting(routers: Sequence[Router], select: Select) -> Iterator[None]:
    """Inside, ``select`` is given what each router selects and returns what it takes, in forward and recomputation."""
    with contextlib.ExitStack() as stack:
        for router in routers:
            stack.enter_context(answering(router.module, _selecting(router, router.module.forward, select)))
        yield


def _selecting(router: Router, forward: Callable[..., Any], select: Select) -> Callable[..., Any]:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(forward)
    def selecting_forward(*args: Any, **kwargs: Any) -> Any:
        with _Selection(router, select) as selection:
            found = forward(*args, **kwargs)
        if not selection.was_seen:
            raise UnsupportedError(
                f"reading or replaying the experts of {router.name}",
                f"{type(router.module).__name__} does not select {router.top_k} of {router.num_experts} by torch.topk",
            )
        return found

    wrapped: Callable[..., Any] = selecting_forward
    return wrapped


class _Selection(TorchFunctionMode):
    """Replaces what ``topk`` over the experts returns."""

    def __init__(self, router: Router, select: Select) -> None:
        super().__init__()
        self._router, self._select = router, select
        self.was_seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _TOP_K:
            return found
        score, size = args[0], (self._router.num_experts, self._router.top_k)
        if (score.shape[-1], found.indices.shape[-1]) != size:  # over groups of experts
            return found
        self.was_seen = True
        selected_RK = found.indices.reshape(-1, self._router.top_k)
        indices = self._select(self._router, selected_RK).reshape(found.indices.shape)
        return type(found)((score.gather(-1, indices), indices))
