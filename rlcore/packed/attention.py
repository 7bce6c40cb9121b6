"""Hidden states of packed sequences: one row of all tokens, and no attention from one sequence to another.

``eligibility`` tells whether a decoder mixes positions by causal attention only. Such a decoder runs on [1, T] with
position ids that start again at each sequence, and its attention is the best implementation of ``choice``, registered
with transformers. Every other decoder runs right-padded [N, L] under its own causal mask, which is correct and computes
the padding too. ``explain`` tells which one runs, and why.

Letters: T packed tokens, N sequences, L longest sequence, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from rlcore.compute_dtype import compute_dtype_of
from rlcore.errors import UnsupportedError
from rlcore.packed.attention_call import AttentionCall
from rlcore.packed.choice import IMPLEMENTATIONS, AttentionChoice, Reasons, are_long, choose, implementations
from rlcore.packed.eligibility import Eligibility, eligibility_of, fault_around
from rlcore.packed.images import PackedImages
from rlcore.packed.implementations import (
    PackedSequences,
    attention_dtype,
    cast_alike,
    no_attention_mask,
    own_attention,
    runs_of,
)
from rlcore.packed.sequence_parallel import SequenceGroup, why_not_split

logger = logging.getLogger(__name__)

_OWN = ("sdpa", "eager")
"""The model's attention implementations that packed attention can replace."""
_SUFFIX = "_or_packed"


@dataclass(slots=True)
class _DecoderPlan:
    """The way in which one decoder runs: packed, and by which implementation in each dtype, or padded."""

    own: str
    eligibility: Eligibility
    choices: dict[bool, dict[torch.dtype, str]] = field(default_factory=lambda: {False: {}, True: {}})
    """For packs that are long, and for others: the implementation by dtype."""
    reasons: Reasons = field(default_factory=dict)
    """Why not what was tried. A probe may compile: the first long pack tries only what is new to it."""
    _faults: dict[type, str | None] = field(default_factory=dict)

    def against_images(self, model: Any) -> str | None:
        """Return the reason why the decoder cannot run packed inside this model, or None."""
        kind = type(model)
        if kind not in self._faults:
            self._faults[kind] = fault_around(model)
            if self._faults[kind] is not None:
                logger.warning("%s runs sequences with images padded: %s", kind.__name__, self._faults[kind])
        return self._faults[kind]


_plans: WeakKeyDictionary[nn.Module, _DecoderPlan] = WeakKeyDictionary()
_sharing: WeakKeyDictionary[nn.Module, SequenceGroup] = WeakKeyDictionary()
"""The decoders whose packed rows are shared with other ranks."""
_splitting: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""The decoders whose heads are on several ranks by tensor parallelism, with the number of these."""


def packed_hidden_states(
    decoder: Any,
    input_ids: Tensor,
    cu_seqlens: Tensor,
    *,
    implementation: str | None = None,
    images: PackedImages | None = None,
) -> Tensor:
    """Return the last hidden state [T, H] of ``decoder``, the bare transformer of a transformers model.

    After ``share_sequences`` every rank of the group calls it with the same row and gets the states of its own tokens,
    those of ``sequence_parallel.own_tokens``.

    Args:
        input_ids: [T] int64.
        cu_seqlens: [N+1] int32, rising from 0 to T. A host tensor saves a wait for the device.
        implementation: one of ``choice.implementations`` by name, or "padded"; by default the best that can.
        images: those of the sequences, and the model around the decoder that reads them.

    Raises:
        UnsupportedError: the implementation asked for cannot run this decoder here.
    """
    lengths, num_tokens = tuple(cu_seqlens.diff().tolist()), len(input_ids)
    plan, group = _plan(decoder), _sharing.get(_whole(decoder))
    against = plan.eligibility.reason or (None if images is None else plan.against_images(images.base))
    is_padded = implementation == "padded" or (implementation is None and against is not None)
    if is_padded and group is None:
        return _run_padded(decoder, input_ids, lengths, images)
    if is_padded or against is not None:
        reason = against or "padded rows are not shared among ranks"
        what = f"packed attention by {implementation!r}" if group is None else "sequence parallelism"
        raise UnsupportedError(what, reason)
    calls, runs = _calls(decoder, plan), runs_of(lengths)
    if group is not None:
        input_ids, cu_seqlens, lengths = group.evened(input_ids, cu_seqlens, lengths)
    packed = PackedSequences(
        cu_seqlens=cu_seqlens.to(input_ids.device, torch.int32, non_blocking=True),
        lengths=lengths,
        choose=lambda device, dtype, of_long: (
            choose(calls, device, dtype, implementation, of_long=of_long, reasons=plan.reasons).implementation
        ),
        choices=plan.choices if implementation is None else None,
        group=group,
        are_long=implementation is None and are_long(calls, _whole(decoder).config.num_hidden_layers, runs),
        num_padding=len(input_ids) - num_tokens,
    )
    # The choice is made before a compiled block asks for it, which would break its graph. In FSDP's forward the root's
    # parameters have the compute dtype.
    dtype = attention_dtype(input_ids.device.type, compute_dtype_of(decoder))
    for of_long in {False, packed.are_long}:
        name = packed.choices[of_long].get(dtype) or _choose(packed, input_ids, dtype, of_long)
        implementations(input_ids.device.type)[name].prepare(packed, {call.window for call in plan.eligibility.calls})
    if packed.are_long and packed.choices[True][dtype] == packed.choices[False][dtype]:
        packed.are_long = packed.are_long_in_graphs = False  # compiled blocks would have graphs of the same for it
    own = slice(None) if group is None else group.own(len(input_ids))
    options = {
        "position_ids": _positions(packed.cu_seqlens, lengths)[None, own],
        "attention_mask": no_attention_mask(input_ids.device),
        "packed_sequences": packed,
    }
    if images is not None:
        return images.run(decoder, input_ids[None], lambda value_T: value_T[None], **options)[0]
    hidden_1TH: Tensor = decoder(input_ids=input_ids[None, own], use_cache=False, **options).last_hidden_state
    return hidden_1TH[0] if group is None else hidden_1TH[0, : max(0, num_tokens - own.start)]


def why_not_shared(decoder: Any, num_ranks: int) -> str | None:
    """Return the reason why so many ranks cannot share the packed rows of ``decoder``, or None. Changes nothing."""
    eligibility = _eligibility(decoder, _own_name(decoder))
    reasons = (why_not_split(call, num_ranks) for call in sorted(eligibility.calls, key=repr))
    return eligibility.reason or next(filter(None, reasons), None)


def share_sequences(decoder: nn.Module, group: SequenceGroup) -> None:
    """Let ``packed_hidden_states`` of ``decoder`` compute this rank's part of each row, from now on.

    The caller has asked ``why_not_shared``.
    """
    _sharing[decoder] = group
    _plans.pop(decoder, None)  # it may have chosen for all heads


def why_heads_not_split(decoder: Any, num_ranks: int, num_sharing: int = 1) -> str | None:
    """Return the reason why tensor parallelism over ``num_ranks`` cannot cut the heads of ``decoder``, or None.

    Args:
        num_sharing: ranks that share packed rows, each set of heads among as many.
    """
    eligibility = _eligibility(decoder, _own_name(decoder))
    if eligibility.reason is not None:
        return eligibility.reason
    for call in sorted(eligibility.calls, key=repr):
        for heads, kind in ((call.query_heads, "query"), (call.kv_heads, "key and value")):
            if heads % num_ranks:
                return f"its {heads} {kind} heads do not divide by {num_ranks}; take a divisor of them"
        if reason := why_not_split(call.of_rank(num_ranks), num_sharing):
            return f"on each of {num_ranks} tensor-parallel ranks: {reason}"
    return None


def split_heads(decoder: nn.Module, num_ranks: int) -> None:
    """Let ``packed_hidden_states`` of ``decoder`` expect this rank's heads alone; see ``why_heads_not_split``."""
    _splitting[decoder] = num_ranks
    _plans.pop(decoder, None)


def explain(decoder: nn.Module, device: torch.device, dtype: torch.dtype, *, of_long: bool = False) -> AttentionChoice:
    """Return what ``packed_hidden_states`` runs on ``device`` for attention in ``dtype``, and why not the others.

    Args:
        of_long: for packs that ``choice.are_long``.
    """
    plan = _plan(decoder)
    reason = plan.eligibility.reason
    if reason is not None:
        return AttentionChoice("padded", tuple((name, reason) for name in implementations(device.type)))
    return choose(_calls(decoder, plan), device, dtype, of_long=of_long, reasons=plan.reasons)


def _calls(decoder: Any, plan: _DecoderPlan) -> frozenset[AttentionCall]:
    """Return the attention calls of this rank."""
    group, num_ranks = _sharing.get(_whole(decoder)), _splitting.get(_whole(decoder), 1)
    num_sharing = 1 if group is None else group.size
    return frozenset(call.of_rank(num_ranks).of_rank(num_sharing) for call in plan.eligibility.calls)


def _whole(decoder: Any) -> Any:
    return getattr(decoder, "_orig_mod", decoder)  # torch.compile's wrapper


def _own_name(decoder: Any) -> str:
    config = getattr(decoder, "config", None)
    return str(getattr(config, "_attn_implementation", None)).removesuffix(_SUFFIX)


def _plan(decoder: nn.Module) -> _DecoderPlan:
    whole = _whole(decoder)
    name = _own_name(whole)
    plan = _plans.get(whole)
    if plan is None or name != plan.own:
        plan = _plans[whole] = _make_plan(whole, name)
    if plan.eligibility.reason is None:  # at every call: somebody may have reset it
        whole.config._attn_implementation_internal = plan.own + _SUFFIX
    return plan


def _make_plan(decoder: nn.Module, own: str) -> _DecoderPlan:
    if own in _OWN:
        _register(own)
    eligibility = _eligibility(decoder, own)
    if eligibility.reason is not None:
        logger.warning("%s runs packed sequences padded: %s", type(decoder).__name__, eligibility.reason)
    return _DecoderPlan(own, eligibility)


def _eligibility(decoder: nn.Module, own: str) -> Eligibility:
    if own in _OWN:
        return eligibility_of(decoder, own)
    return Eligibility(frozenset(), f"its attention is {own!r}; packed attention stands in for {' and '.join(_OWN)}")


# ---------------------------------------------------------------------------------- in transformers' registries


def _register(own: str) -> None:
    """Register an attention that packs if the call has ``packed_sequences``, and is the model's ``own`` otherwise."""
    AttentionInterface.register(own + _SUFFIX, partial(_attention, own))
    AttentionMaskInterface.register(own + _SUFFIX, ALL_MASK_ATTENTION_FUNCTIONS[own])


def _attention(  # noqa: PLR0917  # transformers' signature
    own: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_sequences: PackedSequences | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    if packed_sequences is None:
        result: tuple[Tensor, Tensor | None] = own_attention(module, own)(
            module, query, key, value, attention_mask, **options
        )
        return result
    dtype = attention_dtype(query.device.type, query.dtype)
    is_compiled = torch.compiler.is_compiling()
    of_long = packed_sequences.are_long_in_graphs if is_compiled else packed_sequences.are_long
    name = packed_sequences.choices[of_long].get(dtype) or _choose(packed_sequences, query, dtype, of_long)
    # Compiled code reads only the constant table.
    found = IMPLEMENTATIONS[name] if name in IMPLEMENTATIONS else implementations(query.device.type)[name]
    attend: Callable[..., Tensor] = found.attend
    group = packed_sequences.group
    if group is None:
        return attend(module, query, key, value, packed_sequences, own=own, **options), None
    if options.get("s_aux") is not None:
        options["s_aux"] = group.own_heads(options["s_aux"])
    qkv = group.to_heads(*cast_alike(query, key, value))
    return group.to_tokens(attend(module, *qkv, packed_sequences, own=own, **options)), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _choose(packed: PackedSequences, query: Tensor, dtype: torch.dtype, of_long: bool) -> str:
    # Only the attention call knows the compute dtype: FSDP and autocast cast before it.
    return packed.choices[of_long].setdefault(dtype, packed.choose(query.device, dtype, of_long))


# ------------------------------------------------------------------------------------------------------ batches


def _run_padded(
    decoder: Any, input_ids: Tensor, lengths: tuple[int, ...], images: PackedImages | None = None
) -> Tensor:
    """Run right-padded under a causal mask: no token sees another sequence or the padding, with any attention."""

    def padded(value_T: Tensor) -> Tensor:
        return nn.utils.rnn.pad_sequence(list(torch.split(value_T, list(lengths))), batch_first=True)

    hidden_NLH: Tensor
    if images is None:
        hidden_NLH = decoder(input_ids=padded(input_ids), use_cache=False).last_hidden_state
    else:
        hidden_NLH = images.run(decoder, padded(input_ids), padded)
    return torch.cat([hidden_LH[:length] for hidden_LH, length in zip(hidden_NLH, lengths, strict=True)])


def _positions(cu_seqlens: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Return the position of every token in its sequence, [T] int64."""
    total = sum(lengths)
    starts_T = cu_seqlens[:-1].long().repeat_interleave(cu_seqlens.diff(), output_size=total)
    return torch.arange(total, device=cu_seqlens.device) - starts_T
