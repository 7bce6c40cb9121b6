"""Registers the two implementations that every operator has on every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcore.hookspecs import RegisterOp, hookimpl

if TYPE_CHECKING:
    from rlcore.kernels.dispatch import Query

_OPERATORS = ("token_logprob", "linear_logprob", "linear_loss")


@hookimpl
def rlcore_register_ops(register: RegisterOp) -> None:
    for op in _OPERATORS:
        for name, priority in (("reference", 0), ("chunked", 10)):
            path = f"rlcore.kernels.{op}:{op}_{name}"
            register(op, "*", path, name=name, priority=priority, when=f"{__name__}:{name}_refusal")


def reference_refusal(query: Query) -> str | None:
    if "memory_budget" in query.options:
        return "it holds all logits at once, so it cannot keep a memory budget"
    return chunked_refusal(query)


def chunked_refusal(query: Query) -> str | None:
    if "group" in query.options:
        return "it needs all vocabulary rows on one rank; gather the weight and leave out group="
    return None
