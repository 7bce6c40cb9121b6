"""Registers the implementations of the operators: two that run on every device, and those written in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcore.hookspecs import RegisterOp, hookimpl

if TYPE_CHECKING:
    from rlcore.kernels.dispatch import Query

_OPERATORS = ("token_logprob", "linear_logprob", "linear_loss")
_RECURRENCES = ("gae", "discounted_return")
_TRITON = (
    ("token_logprob", "triton", 20, "triton_rows:token_logprob_triton", "rows_refusal"),
    ("linear_logprob", "rows", 20, "linear_rows:linear_logprob_rows", "rows_refusal"),
    ("linear_loss", "rows", 20, "linear_rows:linear_loss_rows", "rows_refusal"),
    ("linear_logprob", "tiled", 30, "linear_tiled:linear_logprob_tiled", "tiled_refusal"),
    ("linear_loss", "tiled", 30, "linear_tiled:linear_loss_tiled", "tiled_refusal"),
    ("group_advantage", "triton", 20, "triton_advantages:group_advantage_triton", "groups_refusal"),
    ("gae", "triton", 20, "triton_returns:gae_triton", "scans_refusal"),
    ("discounted_return", "triton", 20, "triton_returns:discounted_return_triton", "scans_refusal"),
    ("strided_copy", "triton", 20, "triton_strided_copy:TritonCopies", "copies_refusal"),
)
"""Operator, name, priority, path and predicate. For any device type: ``target`` asks what Triton builds for here."""


@hookimpl
def rlcore_register_ops(register: RegisterOp) -> None:
    for op in _OPERATORS:
        for name, priority in (("reference", 0), ("chunked", 10)):
            path = f"rlcore.kernels.{op}:{op}_{name}"
            register(op, "*", path, name=name, priority=priority, when=f"{__name__}:{name}_refusal")
    register("group_advantage", "*", "rlcore.kernels.advantages:group_advantage_reference", name="reference")
    for op in ("linear_logprob", "linear_loss"):
        path = f"rlcore.kernels.vocab_parallel:{op}_vocab_parallel"
        when = f"{__name__}:vocab_parallel_refusal"
        register(op, "*", path, name="vocab_parallel", priority=15, when=when)
    register("strided_copy", "*", "rlcore.kernels.strided_copy:ViewCopies", name="views")
    for op in _RECURRENCES:
        for name, priority in (("reference", 0), ("scan", 10)):
            register(op, "*", f"rlcore.kernels.returns:{op}_{name}", name=name, priority=priority)
    for op, name, priority, path, when in _TRITON:
        register(op, "*", f"rlcore.kernels.{path}", name=name, priority=priority, when=f"rlcore.kernels.target:{when}")


def reference_refusal(query: Query) -> str | None:
    if "memory_budget" in query.options:
        return "it holds all logits at once, so it cannot keep a memory budget"
    return chunked_refusal(query)


def chunked_refusal(query: Query) -> str | None:
    if "group" in query.options:
        return "it needs all vocabulary rows on one rank; gather the weight and leave out group="
    return None


def vocab_parallel_refusal(query: Query) -> str | None:
    return None if "group" in query.options else "it is for a vocabulary split over the ranks of group="
