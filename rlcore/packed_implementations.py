"""Ways to attend within packed sequences and never across them, and the choice between them.

Each takes what transformers gives an attention function, with T tokens of all sequences in one row, and returns
[1, T, heads, D]. One is chosen by what it says it cannot do and by a probe: forward and backward over a few short
sequences on the device, held against plain torch. So what a device, a torch or a package can do is tried, not assumed.

Letters: T packed tokens, N sequences, D width of a head.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.device_interface import get_interface_for_device
from torch.nn.attention.flex_attention import create_block_mask
from transformers.modeling_flash_attention_utils import _flash_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from rlcore.errors import InvalidInputError, UnsupportedError

logger = logging.getLogger(__name__)

_PROBE_LENGTHS = (1, 37, 5, 150)  # one token, odd ones, and more than one block of 128
_PROBE_WINDOW = 16
_TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float32: 5e-3, torch.float64: 1e-9}
"""Largest relative error of a probe. A wrong mask is off by 0.1 and more; TF32 products by 1e-3."""


class AttentionCall(NamedTuple):
    """What one layer asks of its attention."""

    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    """A token attends to this many tokens, itself among them; None is all before it."""
    softcap: float | None = None
    has_sinks: bool = False
    has_dropout: bool = False


class Choice(NamedTuple):
    """Which implementation runs, and why each other one does not."""

    implementation: str
    """One of ``IMPLEMENTATIONS``, or "padded"."""
    refused: tuple[tuple[str, str], ...]
    """(implementation, reason)."""

    def __str__(self) -> str:
        return "\n".join([f"{self.implementation} runs", *(f"not {name}: {reason}" for name, reason in self.refused)])


@dataclass(slots=True, eq=False)
class PackedSequences:
    """Where the sequences of one packed row are; handed through the decoder to every attention call."""

    cu_seqlens: Tensor
    """[N+1] int32 on the device."""
    lengths: tuple[int, ...]
    max_length: int
    choices: dict[torch.dtype, str]
    """The implementation by the dtype that attention computes in."""
    choose: Callable[[torch.device, torch.dtype], Choice]
    block_masks: dict[int | None, Any] = field(default_factory=dict)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(count, length) of neighbours of equal length."""
        return [(len(list(run)), length) for length, run in groupby(self.lengths) if length]


# -------------------------------------------------------------------------------------------- implementations


def attend_flash(version: int) -> Callable[..., Tensor]:
    """The flash-attn package, through transformers."""

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: PackedSequences,
        **options: Any,
    ) -> Tensor:
        result: Tensor = _flash_attention_forward(
            *(x.transpose(1, 2) for x in _cast_alike(query, key, value)),
            None,
            query_length=query.shape[2],
            is_causal=True,
            dropout=options.get("dropout", 0.0),
            softmax_scale=options["scaling"],
            sliding_window=options.get("sliding_window"),
            softcap=options.get("softcap"),
            attn_implementation=f"flash_attention_{version}",
            cu_seq_lens_q=packed.cu_seqlens,
            cu_seq_lens_k=packed.cu_seqlens,
            max_length_q=packed.max_length,
            max_length_k=packed.max_length,
        )
        return result

    return attend


def attend_varlen(
    module: Any, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, **options: Any
) -> Tensor:
    """torch's variable-length attention."""
    window = options.get("sliding_window")
    result: Tensor = importlib.import_module("torch.nn.attention.varlen").varlen_attn(
        *(x[0].transpose(0, 1) for x in _cast_alike(query, key, value)),
        packed.cu_seqlens,
        packed.cu_seqlens,
        packed.max_length,
        packed.max_length,
        scale=options["scaling"],
        window_size=(-1 if window is None else window - 1, 0),  # it does not count the token itself
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return result[None]


def attend_flex(
    module: Any, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, **options: Any
) -> Tensor:
    """Compiled flex attention under a mask of blocks, through transformers."""
    result: Tensor = ALL_ATTENTION_FUNCTIONS["flex_attention"](
        module,
        *_cast_alike(query, key, value),
        _block_mask(packed, options.get("sliding_window")),
        scaling=options["scaling"],
        softcap=options.get("softcap"),
        s_aux=options.get("s_aux"),
    )[0]
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a loop over lengths would compile for every batch
def attend_per_sequence(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSequences,
    *,
    own: str,
    sliding_window: int | None = None,
    **options: Any,
) -> Tensor:
    """The model's ``own`` attention, "sdpa" or "eager", over one run of equally long sequences after another."""
    attend = own_attention(module, own)
    outputs, start = [], 0
    for count, length in packed.runs:
        rows = slice(start, start + count * length)
        qkv = [_sequences(x, rows, count) for x in (query, key, value)]
        outputs += _attend_causal(attend, module, qkv, sliding_window, is_additive=own == "eager", options=options)
        start = rows.stop
    return torch.cat(outputs)[None]


def _sequences(x: Tensor, rows: slice, count: int) -> Tensor:
    """[1, heads, T, D] to [count, heads, L, D], for the T rows of ``count`` sequences."""
    part = x[0, :, rows]
    return part.reshape(part.shape[0], count, -1, part.shape[2]).transpose(0, 1)


def _attend_causal(
    attend: Callable[..., Any],
    module: nn.Module,
    qkv: list[Tensor],
    window: int | None,
    *,
    is_additive: bool,
    options: dict[str, Any],
) -> list[Tensor]:
    """[count * L, heads, D] of ``count`` sequences; a window is walked in steps, so that memory grows as L."""
    query, key, value = qkv
    length = query.shape[2]
    if window is None or window >= length:
        mask = _band_mask(query, range(length), range(length), length) if is_additive else None
        return [attend(module, query, key, value, mask, **options)[0].flatten(0, 1)]
    outputs = []
    for first in range(0, length, window):
        rows = range(first, min(first + window, length))
        columns = range(max(0, first - window + 1), rows.stop)
        mask = _band_mask(query, rows, columns, window, is_additive=is_additive)
        seen = slice(columns.start, columns.stop)
        part = attend(module, query[:, :, first : rows.stop], key[:, :, seen], value[:, :, seen], mask, **options)[0]
        outputs.append(part)
    return [torch.cat(outputs, dim=1).flatten(0, 1)]


def _band_mask(like: Tensor, rows: range, columns: range, window: int, *, is_additive: bool = True) -> Tensor:
    row = torch.arange(rows.start, rows.stop, device=like.device)[:, None]
    column = torch.arange(columns.start, columns.stop, device=like.device)[None]
    allowed = ((column <= row) & (row - column < window))[None, None]
    if not is_additive:
        return allowed
    return torch.zeros_like(allowed, dtype=like.dtype).masked_fill(~allowed, torch.finfo(like.dtype).min)


def own_attention(module: nn.Module, name: str) -> Callable[..., Any]:
    """The function that transformers would call for ``attn_implementation=name``; "eager" is in the model's file."""
    if name != "eager":
        return ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-any-return]
    files = (sys.modules[cls.__module__] for cls in type(module).__mro__)
    found = next((file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward")), None)
    if found is None:
        raise UnsupportedError("packed attention", f"the file of {type(module).__name__} has no eager attention")
    return found  # type: ignore[no-any-return]


def _cast_alike(*tensors: Tensor) -> list[Tensor]:
    """As autocast does for scaled_dot_product_attention: rotary embeddings leave queries and keys in float32."""
    dtype = compute_dtype(tensors[0])
    return [tensor.to(dtype) for tensor in tensors]


def compute_dtype(query: Tensor) -> torch.dtype:
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _block_mask(packed: PackedSequences, window: int | None) -> Any:
    if window not in packed.block_masks:
        device, total = packed.cu_seqlens.device, sum(packed.lengths)
        sequence_T = torch.searchsorted(packed.cu_seqlens[1:], torch.arange(total, device=device), right=True)

        def mask_mod(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            seen = (sequence_T[row] == sequence_T[column]) & (column <= row)
            return seen if window is None else seen & (row - column < window)

        packed.block_masks[window] = create_block_mask(
            mask_mod, B=None, H=None, Q_LEN=total, KV_LEN=total, device=str(device), _compile=True
        )
    return packed.block_masks[window]


# ----------------------------------------------------------------------------------------------- what each lacks


def _flash_2_lacks(call: AttentionCall, device: torch.device) -> str | None:
    if not is_flash_attn_2_available():
        return "the package flash-attn is not installed for this device"
    return _lacks(call, "has_sinks")


def _flash_3_lacks(call: AttentionCall, device: torch.device) -> str | None:
    if not is_flash_attn_3_available():
        return "the package flash-attn 3 is not installed for this device"
    return _lacks(call, "has_sinks", "has_dropout")


def _varlen_lacks(call: AttentionCall, device: torch.device) -> str | None:
    try:
        varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has none"
    if not {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():
        return f"that of torch {torch.__version__} has no sliding windows"
    return _lacks(call, "softcap", "has_sinks", "has_dropout")


def _flex_lacks(call: AttentionCall, device: torch.device) -> str | None:
    try:
        get_interface_for_device(device.type).raise_if_triton_unavailable(device)
    except (ImportError, NotImplementedError, RuntimeError) as error:
        return f"it is slow unless compiled with triton: {_first_line(error)}"
    return _lacks(call, "has_dropout")


def _per_sequence_lacks(call: AttentionCall, device: torch.device) -> str | None:
    return None


def _lacks(call: AttentionCall, *features: str) -> str | None:
    asked = [name.removeprefix("has_") for name in features if getattr(call, name)]
    return f"it has no {' and no '.join(asked)}" if asked else None


class Implementation(NamedTuple):
    attend: Callable[..., Tensor]
    lacks: Callable[[AttentionCall, torch.device], str | None]


IMPLEMENTATIONS = {
    "flash_attention_3": Implementation(attend_flash(3), _flash_3_lacks),
    "flash_attention_2": Implementation(attend_flash(2), _flash_2_lacks),
    "varlen_attn": Implementation(attend_varlen, _varlen_lacks),
    "flex_attention": Implementation(attend_flex, _flex_lacks),
    "per_sequence": Implementation(attend_per_sequence, _per_sequence_lacks),
}
"""Best first; the last can do all that the model itself can."""


# ------------------------------------------------------------------------------------------------------ choosing


def choose(
    calls: frozenset[AttentionCall], device: torch.device, dtype: torch.dtype, implementation: str | None = None
) -> Choice:
    """The first implementation that serves every one of ``calls``; ``implementation`` asks for one by name.

    Raises:
        InvalidInputError: no such implementation.
        UnsupportedError: the one asked for cannot; says why.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise InvalidInputError(f"packed attention has {', '.join(IMPLEMENTATIONS)}; got {implementation!r}")
    refused: list[tuple[str, str]] = []
    for name in IMPLEMENTATIONS if implementation is None else [implementation]:
        reason = next(
            (found for call in sorted(calls, key=repr) if (found := _refusal(name, call, device, dtype))), None
        )
        if reason is None:
            choice = Choice(name, tuple(refused))
            logger.info("packed attention in %s on %s: %s", dtype, device.type, str(choice).replace("\n", "; "))
            return choice
        refused.append((name, reason))
    raise UnsupportedError(f"packed attention in {dtype} on {device.type} by {implementation!r}", refused[-1][1])


def _refusal(name: str, call: AttentionCall, device: torch.device, dtype: torch.dtype) -> str | None:
    reason = IMPLEMENTATIONS[name].lacks(call, device)
    if reason is not None or name == "per_sequence":
        return reason
    try:
        return _probe(name, call, device, dtype)
    except Exception as error:  # of a package's or a compiler's own making
        return f"its probe failed: {type(error).__name__}: {_first_line(error)}"


def _probe(name: str, call: AttentionCall, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the results or gradients of ``name`` are wrong, or None."""
    call = call._replace(window=call.window and _PROBE_WINDOW)
    total = sum(_PROBE_LENGTHS)
    sizes = [(call.query_heads, call.head_dim), (call.kv_heads, call.head_dim), (call.kv_heads, call.value_dim)]
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, heads, total, width, generator=generator) for heads, width in sizes]
    weight = torch.randn(1, total, call.query_heads, call.value_dim, generator=generator).to(device)
    sinks = torch.randn(call.query_heads, generator=generator).to(device, dtype) if call.has_sinks else None
    packed = PackedSequences(
        torch.tensor([0, *_PROBE_LENGTHS], device=device).cumsum(0).int(),
        _PROBE_LENGTHS,
        max(_PROBE_LENGTHS),
        {},
        _none,
    )
    module = SimpleNamespace(training=True, is_causal=True)
    options = {"scaling": call.head_dim**-0.5, "sliding_window": call.window, "softcap": call.softcap, "s_aux": sinks}

    def run(fn: Callable[..., Tensor], compute: torch.dtype) -> list[Tensor]:
        leaves = [x.to(device, dtype).to(compute).requires_grad_() for x in qkv]
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            output = fn(module, *leaves, packed, **options)
            gradients = torch.autograd.grad((output.to(compute) * weight.to(compute)).sum(), leaves)
        return [output.detach(), *gradients]

    wide = torch.promote_types(dtype, torch.float32)
    for part, found, expected in zip(["output", "dq", "dk", "dv"], run(IMPLEMENTATIONS[name].attend, dtype),
                                     run(_definition, wide), strict=True):  # fmt: skip
        error = float((found.to(wide) - expected).norm() / expected.norm())
        if not error <= _TOLERANCE.get(dtype, 0.0):
            return f"its probe gave a wrong {part}: relative error {error:.1e}"
    return None


def _definition(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSequences,
    *,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Packed attention in plain torch, with every score in memory."""
    group, total = query.shape[1] // key.shape[1], query.shape[2]
    scores = query @ key.repeat_interleave(group, 1).mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    row = torch.arange(total, device=query.device)
    sequence = torch.searchsorted(packed.cu_seqlens[1:], row, right=True)
    apart = row[:, None] - row
    seen = (sequence[:, None] == sequence) & (apart >= 0) & (apart < (sliding_window or total))
    scores = scores.masked_fill(~seen, float("-inf"))
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.to(scores).view(1, -1, 1, 1).expand(-1, -1, total, 1)], dim=-1)
    return (scores.softmax(-1)[..., :total] @ value.repeat_interleave(group, 1)).transpose(1, 2)


def _none(device: torch.device, dtype: torch.dtype) -> Choice:
    raise AssertionError("a probe calls its implementation by name")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]
