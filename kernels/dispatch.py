"""The dispatcher: it chooses the implementation of an operator, and says why the others do not run.

Candidates come from the registry; the one with the highest priority that does not refuse is chosen, once per
distinct query, and then it is a dictionary lookup. Nothing falls back in silence: a choice is logged, keeps
every refusal with its reason, and an implementation that was asked for by name runs or raises.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rlcore.errors import InvalidInputError, PluginError, UnsupportedError, one_line
from rlcore.planned import PlannedDevice
from rlcore.plugins import BUILT_IN
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
    """Optional features in use, such as "entropy", "bias", "keep_mask", "memory_budget", "group" or "row_stats"."""
    planned: PlannedDevice | None = None
    """The device, where nothing runs on it: its memory is planned."""


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
    if candidate.plugin in BUILT_IN:
        return _answer(candidate, query)
    try:
        return _answer(candidate, query)
    except (Exception, SystemExit) as error:  # somebody else's code
        reason = f"its predicate {candidate.when} of plugin {candidate.plugin!r} failed: {one_line(error)}"
        logger.warning("implementation %r of %s is left out: %s", candidate.name, candidate.op, reason)
        return reason


def _answer(candidate: OpImplementation, query: Query) -> str | None:
    reason: object = resolve(candidate.when)(query) if candidate.when else None
    if reason is not None and not isinstance(reason, str):
        raise PluginError(f"it answered {reason!r}, which is neither a reason nor None")
    return reason


def _load(candidate: OpImplementation) -> Callable[..., Any]:
    try:
        fn: Callable[..., Any] = resolve(candidate.path)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"implementation {candidate.name!r} of {candidate.op} is not at {candidate.path!r}: {error}. "
            f"{_way_out(candidate)}"
        ) from error
    if candidate.plugin not in BUILT_IN:
        _check_arguments(candidate, fn)
    return fn


def _check_arguments(candidate: OpImplementation, fn: Callable[..., Any]) -> None:
    """Check that an implementation can be called as the built-in ones of the operator are."""
    built_in = [one for one in registry().ops[candidate.op] if one.plugin in BUILT_IN]
    if not built_in:
        return
    passed = inspect.signature(resolve(built_in[0].path)).parameters.values()
    by_name = [one.name for one in passed if one.kind is one.KEYWORD_ONLY]
    by_place = [one.name for one in passed if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    try:
        taken = inspect.signature(fn)
    except (TypeError, ValueError):  # of a function in C, which cannot be asked
        return
    try:
        taken.bind(*by_place, **dict.fromkeys(by_name))
    except TypeError as error:
        raise PluginError(
            f"implementation {candidate.name!r} of {candidate.op} takes ({', '.join(taken.parameters)}), and is called "
            f"with ({', '.join([*by_place, *by_name])}): {error}. {_way_out(candidate)}"
        ) from error


def _way_out(candidate: OpImplementation) -> str:
    return f"Fix plugin {candidate.plugin!r}, or leave it out: RLCORE_DISABLE_PLUGINS={candidate.plugin}"


def check_implementation(candidate: OpImplementation) -> None:
    """Check that an implementation of a plugin is there, takes what it is called with, and answers when it is asked.

    Raises:
        PluginError: it does not; names the plugin.
    """
    _load(candidate)
    device_type = "cpu" if candidate.device_type == "*" else candidate.device_type
    query = Query(device_type, torch.bfloat16, hidden_size=2048, vocab_size=151_936)
    try:
        _answer(candidate, query)
    except (Exception, SystemExit) as error:  # somebody else's code
        raise PluginError(
            f"the predicate {candidate.when} of implementation {candidate.name!r} of {candidate.op} failed: "
            f"{one_line(error)}. {_way_out(candidate)}"
        ) from error


def outranked(candidate: OpImplementation) -> list[OpImplementation]:
    """Return the built-in implementations that a plugin's goes before, on the same devices; none for a built-in one."""
    ranked = _candidates(candidate.op)
    if candidate.plugin in BUILT_IN:
        return []
    after = ranked[ranked.index(candidate) + 1 :]
    types = ("*", candidate.device_type)
    is_for_all = candidate.device_type == "*"
    return [one for one in after if one.plugin in BUILT_IN and (is_for_all or one.device_type in types)]


def _listing(candidates: list[OpImplementation]) -> str:
    return ", ".join(f"{entry.name} (on {entry.device_type}, plugin {entry.plugin})" for entry in candidates)


def _described(query: Query) -> str:
    options = f" with {', '.join(sorted(query.options))}" if query.options else ""
    return f"{str(query.dtype).removeprefix('torch.')} on {query.device_type}{options}"
