"""A dry run that tells whether a transformers decoder may run on packed sequences.

Packing is right only if a decoder mixes positions by causal attention alone. A twin of the decoder runs under fake
tensors, which have shapes and no values; its attention and mask functions only record their calls. Each layer must call
causal attention once, through transformers' attention interface, with the window of its mask. Anything else is a reason
to run the decoder on padded batches.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from rlcore._torch_private import fake_tensors
from rlcore.packed.attention_call import AttentionCall
from rlcore.packed.dry_runs import kept_dry_runs
from rlcore.packed.fake_twin import NUM_TOKENS, fake_twin
from rlcore.packed.implementations import no_attention_mask, own_attention
from rlcore.probing import short_line

_NAME = "rlcore_recorder"
_UNDERSTOOD = {"scaling", "dropout", "sliding_window", "softcap", "s_aux", "position_ids", "use_cache"}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONFIG_FLAGS = {"is_causal": True, "use_bidirectional_attention": False}


class Eligibility(NamedTuple):
    """The attention ``calls`` of a decoder, or the ``reason`` why its sequences cannot be packed."""

    calls: frozenset[AttentionCall]
    reason: str | None


@dataclass(slots=True)
class _DryRun:
    own: str
    marker: object = field(default_factory=object)
    """A keyword argument of the decoder that every attention call must receive."""
    masks: list[Tensor] = field(default_factory=list)
    """The masks that were handed out: an attention must receive one of them, not a tensor computed from it."""
    windows: dict[int, int | None] = field(default_factory=dict)
    """Id of a requested mask -> its window."""
    calls: list[AttentionCall] = field(default_factory=list)
    layers: list[int | None] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


_record: ContextVar[_DryRun] = ContextVar("rlcore_packed_record")


def eligibility_of(decoder: nn.Module, own: str) -> Eligibility:
    """Find out whether ``decoder``, whose own attention is called ``own``, may run packed."""
    reason = next(_structural_faults(decoder), None)
    if reason is not None:
        return Eligibility(frozenset(), reason)
    AttentionInterface.register(_NAME, _record_call)
    AttentionMaskInterface.register(_NAME, _record_mask)
    try:
        record = _dry_run(decoder, own)
    except Exception as error:  # the model's own code, under tensors without values
        return Eligibility(frozenset(), f"its dry run failed: {type(error).__name__}: {short_line(error)}")
    faults = record.faults + _layer_faults(decoder, record)
    return Eligibility(frozenset(record.calls), faults[0] if faults else None)


def fault_around(model: Any) -> str | None:
    """Return the reason why a model does not hand its decoder what a packed row needs, or None.

    Args:
        model: the one that puts image features in the place of tokens, such as ``LlavaModel``.
    """
    name = type(model).__name__
    marker: Any = object()
    handed: dict[str, Any] = {}

    def record(*args: Any, **kwargs: Any) -> None:
        handed.update(kwargs)
        raise _Handed

    try:
        with fake_tensors(), torch.device("cpu"), torch.no_grad():
            twin = type(model)._from_config(copy.deepcopy(model.config), dtype=torch.bfloat16)
            twin.get_decoder().forward = record
            tokens = torch.ones(1, NUM_TOKENS, dtype=torch.long)
            given = {"position_ids": tokens.clone(), "attention_mask": no_attention_mask(tokens.device)}
            twin(input_ids=tokens, use_cache=False, packed_sequences=marker, **given)
    except _Handed:
        lost = [key for key, value in (given | {"packed_sequences": marker}).items() if handed.get(key) is not value]
        return f"{name} does not hand its decoder {', '.join(lost)} as it was given" if lost else None
    except Exception as error:  # the model's own code, under tensors without values
        return f"the dry run of {name} failed: {type(error).__name__}: {short_line(error)}"
    return f"{name} does not call its decoder"


class _Handed(Exception):  # noqa: N818  # it is no error
    """Ends a dry run at the call of the decoder."""


def _structural_faults(decoder: nn.Module) -> Iterator[str]:
    name = type(decoder).__name__
    if not isinstance(decoder, PreTrainedModel):
        yield f"{name} is not a transformers model"
        return
    if not decoder._supports_attention_backend or not decoder._can_set_attn_implementation():
        yield f"{name} does not call its attention through transformers' attention interface"
    if decoder._is_stateful:
        yield f"{name} has recurrent layers"
    if "position_ids" not in inspect.signature(type(decoder).forward).parameters:
        yield f"{name} takes no position_ids"
    for flag, usual in _CONFIG_FLAGS.items():
        if (value := getattr(decoder.config, flag, None)) not in (None, usual):
            yield f"{name} is not causal: config.{flag} is {value}"
    for path, module in decoder.named_modules():
        if getattr(module, "config", decoder.config) is not decoder.config:
            yield f"{path} of {name} has a config of its own"
        if isinstance(module, _CONVOLUTIONS):
            yield f"{name} has a convolution, {path}"


def _dry_run(decoder: Any, own: str) -> _DryRun:
    kept = kept_dry_runs()
    if kept is None:
        return _new_dry_run(decoder, own)
    key = type(decoder), own, repr(decoder.config.to_dict())
    if key not in kept:
        kept[key] = _new_dry_run(decoder, own)
    found: _DryRun = kept[key]
    return found


def _new_dry_run(decoder: Any, own: str) -> _DryRun:
    """Run a twin of ``decoder``."""
    record = _DryRun(own)
    token = _record.set(record)
    try:
        with torch.no_grad(), fake_twin(decoder, _NAME) as (twin, inputs):
            twin(**inputs, packed_sequences=record.marker)
            record.masks.append(no_attention_mask(inputs["input_ids"].device))
            twin(**inputs, packed_sequences=record.marker, attention_mask=record.masks[-1])  # as the real runs call it
    finally:
        _record.reset(token)
    return record


def _record_mask(**options: Any) -> Tensor:
    record = _record.get()
    if options.get("use_vmap") or "allow_is_causal_skip" not in options:
        record.faults.append("its attention mask is not a plain causal one")
    mask = torch.empty(1, 1, 1, 1, dtype=torch.bool)
    record.masks.append(mask)
    record.windows[id(mask)] = options.get("local_size")
    return mask


def _record_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    record = _record.get()
    own_attention(module, record.own)  # raises where there is none
    record.faults += _call_faults(record, module, (query.shape[2], key.shape[2]), attention_mask, dict(options))
    record.layers.append(getattr(module, "layer_idx", None))
    record.calls.append(
        AttentionCall(
            query_heads=query.shape[1],
            kv_heads=key.shape[1],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            window=options.get("sliding_window"),
            softcap=options.get("softcap"),
            has_sinks=options.get("s_aux") is not None,
            has_dropout=bool(options.get("dropout")),
        )
    )
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _call_faults(
    record: _DryRun, module: nn.Module, lengths: tuple[int, int], mask: Tensor | None, options: dict[str, Any]
) -> list[str]:
    name = type(module).__name__
    faults = []
    if options.pop("packed_sequences", None) is not record.marker:
        faults.append(f"{name} is not handed the keyword arguments of the model")
    if lengths != (NUM_TOKENS, NUM_TOKENS):
        faults.append(f"{name} attends over other positions than the tokens")
    if not options.pop("is_causal", getattr(module, "is_causal", True)):
        faults.append(f"{name} is not causal")
    if not any(mask is given for given in record.masks):
        faults.append(f"{name} attends under a mask of its own")
    window = options.get("sliding_window")
    if record.windows.get(id(mask), window) != window:
        faults.append(f"the mask of {name} has window {record.windows[id(mask)]}, its attention {window}")
    odd = sorted(key for key, option in options.items() if key not in _UNDERSTOOD and option not in (None, False))
    if odd:
        faults.append(f"{name} asks its attention for {', '.join(odd)}")
    return faults


def _layer_faults(decoder: Any, record: _DryRun) -> list[str]:
    expected = list(range(decoder.config.num_hidden_layers))
    if record.layers == expected * 2:  # two runs
        return []
    return [f"of its {len(expected)} layers these attend, in this order: {record.layers[: len(record.layers) // 2]}"]
