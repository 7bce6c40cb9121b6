"""The plugin that registers the implementations of the operators: plain torch for every device, and Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcore.hookspecs import RegisterOp, hookimpl

if TYPE_CHECKING:
    from rlcore.kernels.dispatch import Query

_LOGPROB_OPERATORS = {
    "token_logprob": "token.logprob",
    "linear_logprob": "linear.logprob",
    "linear_loss": "linear.loss",
}
_RECURRENCES = ("gae", "discounted_return")
_TRITON = (
    ("token_logprob", "triton", 20, "token.triton_rows:token_logprob_triton", "rows_refusal"),
    ("linear_logprob", "rows", 20, "linear.rows:linear_logprob_rows", "rows_refusal"),
    ("linear_loss", "rows", 20, "linear.rows:linear_loss_rows", "rows_refusal"),
    ("linear_logprob", "tiled", 30, "linear.tiled:linear_logprob_tiled", "tiled_refusal"),
    ("linear_loss", "tiled", 30, "linear.tiled:linear_loss_tiled", "tiled_refusal"),
    ("group_advantage", "triton", 20, "returns.triton_group_advantage:group_advantage_triton", "groups_refusal"),
    ("gae", "triton", 20, "returns.triton_scan:gae_triton", "scans_refusal"),
    ("discounted_return", "triton", 20, "returns.triton_scan:discounted_return_triton", "scans_refusal"),
    ("strided_copy", "triton", 20, "strided_copy.triton_copy:TritonCopies", "copies_refusal"),
)
"""Operator, name, priority, path and predicate. ``triton_target`` says what Triton builds for the device at hand."""


@hookimpl
def rlcore_register_ops(register: RegisterOp) -> None:
    def builtin(op: str, name: str, priority: int, path: str, when: str | None = None) -> None:
        when = when and f"rlcore.kernels.{when}"
        register(op, "*", f"rlcore.kernels.{path}", name=name, priority=priority, when=when)

    for op, module in _LOGPROB_OPERATORS.items():
        builtin(op, "reference", 0, f"{module}:{op}_reference", "plugin:reference_refusal")
        builtin(op, "chunked", 10, f"{module}:{op}_chunked", "plugin:chunked_refusal")
    for op, module in _LOGPROB_OPERATORS.items():
        path = f"{module.partition('.')[0]}.vocab_parallel:{op}_vocab_parallel"
        builtin(op, "vocab_parallel", 15, path, "plugin:vocab_parallel_refusal")
    for op in _RECURRENCES:
        builtin(op, "reference", 0, f"returns.scan:{op}_reference")
        builtin(op, "scan", 10, f"returns.scan:{op}_scan")
    builtin("group_advantage", "reference", 0, "returns.group_advantage:group_advantage_reference")
    builtin("strided_copy", "views", 0, "strided_copy.op:ViewCopies")
    for op, name, priority, path, refusal in _TRITON:
        builtin(op, name, priority, path, f"triton_target:{refusal}")


def reference_refusal(query: Query) -> str | None:
    if "memory_budget" in query.options:
        return "it holds all logits at once, so it cannot keep a memory budget"
    return chunked_refusal(query)


def chunked_refusal(query: Query) -> str | None:
    if "group" in query.options:
        return "it needs the whole vocabulary on one rank; gather it and leave out group="
    return None


def vocab_parallel_refusal(query: Query) -> str | None:
    return None if "group" in query.options else "it is for a vocabulary split over the ranks of group="
