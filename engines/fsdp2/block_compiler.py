"""Compiles the forward of a module's blocks: blocks of a class share a graph, which keeps little for its backward."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from rlcore.engines._torch_private import allow_graphs, compile_keeping_less

_MAX_GRAPHS = 64
"""Graphs of one code. By itself the compiler makes 8, and runs the rest uncompiled. Blocks of two attention windows
make 12: for training and scoring, for one length, any length, and a single block of flex attention's mask. Without a
window they make at most 4 more for a lone long sequence: for training and scoring, for one length and any length."""
_COMPILE_TAKES_LIMIT = "recompile_limit" in inspect.signature(torch.compile).parameters
_numbers = itertools.count()


class BlockCompiler:
    """Compiles the blocks of one module apart from those of other modules and of other classes.

    torch's compiler counts graphs by code object, and keeps by its name the sizes that have changed: each class of
    blocks of each module has a code object of its own.
    """

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._codes: dict[type, CodeType] = {}

    def compiled(self, forward: Callable[..., Any], cls: type) -> Callable[..., Any]:
        """Return ``forward(block, ...)`` of a block of ``cls``, compiled at the first call with such inputs."""
        call = _caller(forward)
        own = call.__code__.replace(co_name=f"{cls.__name__}_{self._number}")
        call.__code__ = self._codes.setdefault(cls, own)
        limit: dict[str, Any] = {"recompile_limit": _MAX_GRAPHS} if _COMPILE_TAKES_LIMIT else {}
        if not limit:  # older torch has one limit for the whole process
            allow_graphs(_MAX_GRAPHS)
        compiled: Callable[..., Any] = torch.compile(functools.wraps(forward)(call), backend=backend, **limit)
        return compiled


def _caller(forward: Callable[..., Any]) -> Any:
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    return call


def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """Compile by Inductor, keeping less for the backward than it does by itself.

    By itself it keeps all that a product of the backward reads. Here values that one pass over memory makes again are
    not kept: weights in the compute dtype, norms, and the activation between two products of an MLP. A block of
    Qwen2.5-1.5B keeps 24,860 values a token instead of 36,892.
    """
    return compile_keeping_less(graph, inputs)
