"""The answer of ``rlcore ops explain``: which implementation of an operator would run, and why not the others."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from rlcore.arguments import did_you_mean
from rlcore.errors import InvalidInputError, MissingDependencyError
from rlcore.kernels.dispatch import Query, choose, outranked
from rlcore.kernels.operands import FLOATS
from rlcore.kernels.returns.group_advantage import MODES
from rlcore.plugins import BUILT_IN
from rlcore.registry import get_device, registry
from rlcore.tensor_data import dtype_name

_PACKED, _NORM, _COPY = "packed_attention", "rms_norm", "strided_copy"
_OF_HEADS = frozenset({"bias", "entropy", "softcap", "memory_budget", "group"})
OPTIONS = {
    "token_logprob": frozenset({"entropy", "keep_mask", "inplace_backward", "group", "row_stats"}),
    "linear_logprob": _OF_HEADS | {"row_stats"},
    "linear_loss": _OF_HEADS | {"sequence_level"},
    "group_advantage": frozenset({*MODES, "irregular", "long"}),
    "gae": frozenset(),
    "discounted_return": frozenset(),
    _COPY: frozenset(),
    _NORM: frozenset(),
    _PACKED: frozenset({"window", "softcap", "sinks", "dropout", "long"}),
}
"""The options that each operator of rlcore can put into ``Query.options``; operators of plugins may put others."""


class Explanation(NamedTuple):
    implementation: str
    refused: tuple[tuple[str, str], ...]
    """(implementation, reason)."""
    plugin: str = ""
    """The third party's plugin that it is from; "" for a built-in one."""
    outranks: tuple[str, ...] = ()
    """Built-in implementations that the plugin's goes before."""


def explain(
    op: str,
    *,
    device: str | None,
    dtype: str,
    hidden_size: int,
    vocab_size: int,
    options: Collection[str],
    implementation: str | None,
) -> Explanation:
    """Make the choice that the operator would make for a call with these properties.

    Raises:
        InvalidInputError: no such operator, implementation, floating-point dtype, or option of the operator.
        UnsupportedError: no implementation, or not the requested one, can run here; says why.
    """
    _check_options(op, options)
    found = next((one for one in FLOATS if dtype_name(one) == dtype), None)
    if found is None:
        raise InvalidInputError(f"--dtype must be one of {', '.join(map(dtype_name, FLOATS))}, got {dtype!r}")
    at = get_device(device).torch_device
    if op == _PACKED:
        return _of_packed_attention(at, found, options, implementation)
    if op == _NORM and implementation is None and (others := _for_other_devices(at.type)) is not None:
        return Explanation("the module's own forward", others)
    query = Query(at.type, torch.uint8 if op == _COPY else found, hidden_size, vocab_size, frozenset(options))
    choice = choose(op, query, implementation)
    return Explanation(choice.implementation, choice.refused, *_third_party(op, choice.implementation, at.type))


def _third_party(op: str, name: str, device_type: str) -> tuple[str, tuple[str, ...]]:
    """Return the plugin of an implementation and the built-in ones that it goes before; nothing for a built-in one."""
    entries = registry().ops[op]
    chosen = next(one for one in entries if one.name == name and one.device_type in ("*", device_type))
    if chosen.plugin in BUILT_IN:
        return "", ()
    return chosen.plugin, tuple(one.name for one in outranked(chosen))


def _check_options(op: str, options: Collection[str]) -> None:
    known = OPTIONS.get(op)
    unknown = [] if known is None else [option for option in options if option not in known]
    if unknown and known is not None:
        accepted = f"one of {', '.join(sorted(known))}" if known else "left out"
        hint = did_you_mean(unknown[0], known)
        raise InvalidInputError(f"--option must be {accepted} for {op}, got {unknown[0]!r}{hint}")


def _for_other_devices(device_type: str) -> tuple[tuple[str, str], ...] | None:
    """Return the registered norms with reasons if all are for other device types; None if one is for this type."""
    entries = registry().ops.get(_NORM, ())
    if any(entry.device_type in ("*", device_type) for entry in entries):
        return None
    return tuple((one.name, f"it is for device type {one.device_type!r}, not {device_type!r}") for one in entries)


def _of_packed_attention(
    device: torch.device, dtype: torch.dtype, options: Collection[str], implementation: str | None
) -> Explanation:
    """Explain a layer with ordinary heads; ``rlcore.packed.attention.explain`` does it for the layers of a model."""
    try:
        from rlcore.packed.attention_call import AttentionCall
        from rlcore.packed.choice import choose as choose_attention
    except ImportError as error:
        raise MissingDependencyError("transformers", needed_for=_PACKED, extra="hf") from error
    call = AttentionCall(
        query_heads=16,
        kv_heads=8,
        head_dim=128,
        value_dim=128,
        window=4096 if "window" in options else None,
        softcap=50.0 if "softcap" in options else None,
        has_sinks="sinks" in options,
        has_dropout="dropout" in options,
    )
    choice = choose_attention(frozenset({call}), device, dtype, implementation, of_long="long" in options)
    return Explanation(*choice)
