"""Parameters that every rank of a tensor group has whole, and uses for its own heads alone.

Such as the norm of heads behind a projection that is cut: each rank has the gradient of its heads, and somebody must
sum them. transformers' plans name these modules, but not those of all models.

A twin of the decoder runs under fake tensors, which have shapes and no values, and autograd's graph tells what the
inputs of a module were made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.packed.fake_twin import fake_twin
from rlcore.probing import short_line

_CUT = ("colwise", "packed_colwise")
"""Styles of modules that give each rank a part of their output. After a module of another style it is whole again."""


def why_not_summed(decoder: Any, styles: Mapping[str, str]) -> str | None:
    """Return the reason why the gradients of a decoder would not be whole, or None.

    Args:
        decoder: a transformers decoder.
        styles: the style of each of its modules that a plan names, by path.
    """
    name = type(decoder).__name__
    try:
        path = _first_that_has_parts(decoder, styles)
    except Exception as error:  # the model's own code, under tensors without values
        return f"the dry run of {name} failed: {type(error).__name__}: {short_line(error)}"
    if path is None:
        return None
    return (
        f"transformers' plan cuts the heads before {path} of {name} and does not name it: each rank would train it "
        "with the gradient of its own heads"
    )


def _first_that_has_parts(decoder: Any, styles: Mapping[str, str]) -> str | None:
    found: list[str] = []
    graph = _Graph()
    with torch.enable_grad(), fake_twin(decoder, "eager") as (twin, inputs):
        for path, module in twin.named_modules():
            style = styles.get(path)
            if style is not None:
                module.register_forward_hook(graph.cut if style in _CUT else graph.joined)
            elif next(module.parameters(recurse=False), None) is not None:

                def look(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any], path: str = path) -> None:
                    if any(graph.is_part(one) for one in (*given, *named.values())):
                        found.append(path)

                module.register_forward_pre_hook(look, with_kwargs=True)
        twin(**inputs)
    return found[0] if found else None


class _Graph:
    """Which tensors are made of the outputs of cut modules."""

    def __init__(self) -> None:
        self._is_part: dict[Any, bool] = {}
        """By node of autograd's graph. It keeps the nodes, whose identity counts, alive."""

    def cut(self, module: nn.Module, given: Any, output: Any) -> None:
        self._mark(output, is_part=True)

    def joined(self, module: nn.Module, given: Any, output: Any) -> None:
        self._mark(output, is_part=False)

    def is_part(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.grad_fn is not None and self._walk(value.grad_fn)

    def _mark(self, output: Any, *, is_part: bool) -> None:
        for one in output if isinstance(output, tuple) else (output,):
            if isinstance(one, Tensor) and one.grad_fn is not None:
                self._is_part[one.grad_fn] = is_part

    def _walk(self, node: Any) -> bool:
        """Look behind a node, first at what it was made of: recursion would be too deep."""
        waiting = [node]
        while waiting:
            before = [one for one, _ in waiting[-1].next_functions if one is not None]
            if waiting[-1] in self._is_part:
                waiting.pop()
            elif unknown := [one for one in before if one not in self._is_part]:
                waiting += unknown
            else:
                self._is_part[waiting.pop()] = any(self._is_part[one] for one in before)
        return self._is_part[node]
