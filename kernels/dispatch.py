"""The dispatcher: it chooses the implementation of an operator, and says why the others do not run.

Candidates come from the registry; the one with the highest priority that does not refuse is chosen, once per
distinct query, and then it is a dictionary lookup. Nothing falls back in silence: a choice is logged, keeps
every refusal with its reason, and an implementation that was asked for by name runs or raises.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rlcore.errors import InvalidInputError, PluginError, UnsupportedError
from rlcore.registry import OpImplementation, registry, resolve

logger = logging.getLogger(__name__)


class Query(NamedTuple):
    """The facts that a ``when`` predicate may decide on. The number of tokens, which varies by call, is none."""

    device_type: str
    """``tensor.device.type``."""
    dtype: torch.dtype
    """The dtype of hidden states or logits."""
    hidden_size: int
    """0 for operators that start from logits."""
    vocab_size: int
    options: frozenset[str] = frozenset()
    """Optional features in use, such as "entropy", "bias", "keep_mask", "memory_budget" or "group"."""


class Refusal(NamedTuple):
    implementation: str
    reason: str


@dataclass(frozen=True, slots=True)
class ChosenImplementation:
    """The implementation that serves a query."""

    op: str
    implementation: str
    fn: Callable[..., Any]
    refused: tuple[Refusal, ...]
    """Every other implementation, with the reason why it does not run."""


@functools.cache
def choose(op: str, query: Query, implementation: str | None = None) -> ChosenImplementation:
    """Return the implementation of ``op`` for ``query``; ``implementation`` asks for one by name.

    Raises:
        InvalidInputError: no such operator, or no such implementation of it.
        UnsupportedError: the one asked for refuses, or all refuse; lists the reasons.
        PluginError: the chosen one cannot be imported.
    """
    candidates = _candidates(op)
    if implementation is not None and all(implementation != candidate.name for candidate in candidates):
        raise InvalidInputError(f"{op} has no implementation {implementation!r}; registered: {_listing(candidates)}")
    chosen: OpImplementation | None = None
    refused: list[Refusal] = []
    for candidate in candidates:
        reason = _refusal(candidate, query, implementation)
        if reason is None and chosen is not None:
            reason = f"priority {candidate.priority} is below {chosen.name}'s {chosen.priority}"
        if reason is None:
            chosen = candidate
        else:
            refused.append(Refusal(candidate.name, reason))
    if chosen is None:
        what = op if implementation is None else f"{op} with implementation={implementation!r}"
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused if implementation in (None, name))
        raise UnsupportedError(f"{what} for {_described(query)}", reasons)
    logger.info("%s for %s runs as %r (refused: %s)", op, _described(query), chosen.name, refused or "none")
    return ChosenImplementation(op, chosen.name, _load(chosen), tuple(refused))


def _candidates(op: str) -> list[OpImplementation]:
    ops = registry().ops
    if op not in ops:
        raise InvalidInputError(f"no operator {op!r}; registered: {', '.join(sorted(ops))}")
    return sorted(ops[op], key=lambda entry: (-entry.priority, entry.device_type == "*"))


def _refusal(candidate: OpImplementation, query: Query, implementation: str | None) -> str | None:
    if implementation not in (None, candidate.name):
        return f"implementation={implementation!r} was asked for"
    if candidate.device_type not in ("*", query.device_type):
        return f"it is for device type {candidate.device_type!r}, not {query.device_type!r}"
    reason: str | None = resolve(candidate.when)(query) if candidate.when else None
    return reason


def _load(candidate: OpImplementation) -> Callable[..., Any]:
    try:
        fn: Callable[..., Any] = resolve(candidate.path)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"implementation {candidate.name!r} of {candidate.op} is not at {candidate.path!r}: {error}. "
            f"Fix plugin {candidate.plugin!r}, or leave it out: RLCORE_DISABLE_PLUGINS={candidate.plugin}"
        ) from error
    return fn


def _listing(candidates: list[OpImplementation]) -> str:
    return ", ".join(f"{entry.name} (on {entry.device_type}, plugin {entry.plugin})" for entry in candidates)


def _described(query: Query) -> str:
    options = f" with {', '.join(sorted(query.options))}" if query.options else ""
    return f"{str(query.dtype).removeprefix('torch.')} on {query.device_type}{options}"
