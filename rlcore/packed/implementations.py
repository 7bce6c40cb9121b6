"""Implementations of attention within packed sequences, never across them.

Each has the arguments of a transformers attention function, with the T tokens of all sequences in one row, and returns
[1, T, heads, D].

Letters: T packed tokens, N sequences, L tokens of one sequence, D width of a head.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_flash_attention_utils import _flash_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlcore.errors import UnsupportedError
from rlcore.packed.sequence_parallel import SequenceGroup


class PackedSequences:
    """The boundaries of the sequences in one packed row; the decoder passes it to every attention call.

    It is not a dataclass, because FSDP copies dataclasses and their fields on the way into each block.
    """

    def __init__(
        self,
        cu_seqlens: Tensor,
        lengths: tuple[int, ...],
        choose: Callable[[torch.device, torch.dtype, bool], str],
        choices: dict[bool, dict[torch.dtype, str]] | None = None,
        group: SequenceGroup | None = None,
        *,
        are_long: bool = False,
        num_padding: int = 0,
    ) -> None:
        """
        Args:
            cu_seqlens: [N+1] int32 on the device.
            choose: returns the implementation for a device, a dtype, and whether the pack is long.
            choices: what it returned for earlier packs: is the pack long -> compute dtype of attention -> name.
            group: the ranks that share the row, each of which attends with some of the heads.
            are_long: ``choice.are_long`` of the sequences.
            num_padding: tokens of padding, which are the last of ``lengths`` where there are some.
        """
        self.cu_seqlens = cu_seqlens
        self.lengths = lengths
        self.max_length = max(lengths)
        self.ends = list(itertools.accumulate(lengths))
        self.choices = {False: {}, True: {}} if choices is None else choices
        self.choose = choose
        self.group = group
        self.block_masks: dict[int | None, BlockMask] = {}
        self.are_long = are_long
        self.num_padding = num_padding
        self.unpadded = lengths[:-1] if num_padding else lengths
        self.is_lone = sum(length > 0 for length in self.unpadded) == 1
        """The row is one sequence, with nothing behind it but padding."""
        self.are_long_in_graphs = are_long and self.is_lone
        """A loop over long sequences would break the graph of a compiled block."""
        self.rounded_total = rounded(sum(lengths))

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Return ``runs_of`` the lengths."""
        return runs_of(self.lengths)


def runs_of(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (count, length) of runs of sequences of equal length."""
    return [(len(list(run)), length) for length, run in itertools.groupby(lengths) if length]


def attend_flash(version: int) -> Callable[..., Tensor]:
    """Return the attention of the package flash-attn, called through transformers."""

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: PackedSequences,
        **options: Any,
    ) -> Tensor:
        result: Tensor = _flash_attention_forward(
            *(x.transpose(1, 2) for x in cast_alike(query, key, value)),
            None,
            query_length=query.shape[2],
            is_causal=True,
            dropout=options.get("dropout", 0.0),
            softmax_scale=options["scaling"],
            sliding_window=options.get("sliding_window"),
            softcap=options.get("softcap"),
            deterministic=torch.are_deterministic_algorithms_enabled() or None,  # None: as its own variable says
            attn_implementation=f"flash_attention_{version}",
            cu_seq_lens_q=packed.cu_seqlens,
            cu_seq_lens_k=packed.cu_seqlens,
            max_length_q=packed.max_length,
            max_length_k=packed.max_length,
        )
        return result

    return attend


_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}
"""torch 2.11 has no such option; its kernels accept fewer heads of keys and values without it."""


def attend_varlen(
    module: Any, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, **options: Any
) -> Tensor:
    """Call torch's variable-length attention."""
    window = options.get("sliding_window")
    attend: Callable[..., Any] = varlen.varlen_attn
    result: Tensor = attend(
        *(x[0].transpose(0, 1) for x in cast_alike(query, key, value)),
        packed.cu_seqlens,
        packed.cu_seqlens,
        packed.max_length,
        packed.max_length,
        scale=options["scaling"],
        window_size=(-1 if window is None else window - 1, 0),  # it does not count the token itself
        **(_GROUPED if query.shape[1] != key.shape[1] else {}),
    )
    return result[None]


def attend_flex(
    module: Any, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, **options: Any
) -> Tensor:
    """Call compiled flex attention with a block mask, through transformers."""
    window, masks = options.get("sliding_window"), packed.block_masks
    result: Tensor = ALL_ATTENTION_FUNCTIONS["flex_attention"](
        module,
        *cast_alike(query, key, value),
        masks[window] if window in masks else _block_mask(packed, window),
        scaling=options["scaling"],
        softcap=options.get("softcap"),
        s_aux=options.get("s_aux"),
        kernel_options=_WHOLE_SEQUENCES,
    )[0]
    return result


_WHOLE_SEQUENCES = {"BACKEND": "TRITON"}
"""Below 128 tokens torch would take its decoding kernel, of which torch 2.11 has no float32 version."""


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its loop over lengths would be compiled for every batch
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
    """Call the model's ``own`` attention, "sdpa" or "eager", for each run of equally long sequences."""
    attend = own_attention(module, own)
    if packed.group is not None:
        module = packed.group.as_seen_here(module, query, key)
    outputs, start = [], 0
    for count, length in packed.runs:
        rows = slice(start, start + count * length)
        qkv = [_sequences(x, rows, count) for x in (query, key, value)]
        found = _attend_causal(attend, module, qkv, sliding_window, is_additive=own == "eager", options=options)
        outputs.append(found)
        start = rows.stop
    return torch.cat(outputs)[None]


def attend_long(
    module: Any, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, **options: Any
) -> Tensor:
    """Call ``scaled_dot_product_attention`` for each run of equally long sequences, in a length that recurs.

    On Hopper torch takes cuDNN's kernel for it, which has no form for sequences of several lengths. A lone sequence
    stays in the graph of a compiled block; padding behind it is attended as a part of it, which no earlier token sees.
    Padding behind several gets zeros, because cuDNN would plan for its length.
    """
    qkv = cast_alike(query, key, value)
    if packed.is_lone:
        return _attend_rounded(qkv, packed.rounded_total, options["scaling"])
    result: Tensor = _attend_long_runs(qkv, packed, options["scaling"])
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as that of ``attend_per_sequence``
def _attend_long_runs(qkv: list[Tensor], packed: PackedSequences, scaling: float) -> Tensor:
    outputs, start = [], 0
    for count, length in runs_of(packed.unpadded):
        rows = slice(start, start + count * length)
        parts = [_sequences(x, rows, count) for x in qkv]
        outputs.append(_attend_rounded(parts, rounded(length), scaling).flatten(0, 1))
        start = rows.stop
    outputs.append(outputs[0].new_zeros(packed.num_padding, *outputs[0].shape[1:]))
    return torch.cat(outputs)[None]


def _attend_rounded(qkv: list[Tensor], longer: int, scaling: float) -> Tensor:
    """Return [count, L, heads, D] of [count, heads, L, D], computed in a longer length: no token sees a later one.

    A length that is right already is copied as well: cuDNN plans by strides too, and copies always have the same.
    """
    length, is_grouped = qkv[0].shape[2], qkv[0].shape[1] != qkv[1].shape[1]
    query, key, value = (
        functional.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, longer - length)).transpose(1, 2) for x in qkv
    )
    attended = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=is_grouped
    )
    return attended.transpose(1, 2)[:, :length]


def rounded(length: int) -> int:
    """Return the next of 16 lengths in each power of two; it is longer by less than a sixteenth.

    torch keeps cuDNN's plan for every shape that it has met, for ever.
    """
    step = 1 << max(0, length.bit_length() - 5)
    return -(-length // step) * step


def _sequences(x: Tensor, rows: slice, count: int) -> Tensor:
    """Reshape the rows of ``count`` sequences from [1, heads, T, D] to [count, heads, L, D]."""
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
) -> Tensor:
    """Return [count * L, heads, D] of ``count`` sequences; a window is computed in steps, so memory grows with L."""
    query, key, value = qkv
    length = query.shape[2]
    if window is None or window >= length:
        mask = _band_mask(query, range(length), range(length), length) if is_additive else None
        whole: Tensor = attend(module, query, key, value, mask, **options)[0]
        return whole.flatten(0, 1)
    outputs = []
    for first in range(0, length, window):
        rows = range(first, min(first + window, length))
        columns = range(max(0, first - window + 1), rows.stop)
        mask = _band_mask(query, rows, columns, window, is_additive=is_additive)
        seen = slice(columns.start, columns.stop)
        part = attend(module, query[:, :, first : rows.stop], key[:, :, seen], value[:, :, seen], mask, **options)[0]
        outputs.append(part)
    return torch.cat(outputs, dim=1).flatten(0, 1)


def _band_mask(like: Tensor, rows: range, columns: range, window: int, *, is_additive: bool = True) -> Tensor:
    row = torch.arange(rows.start, rows.stop, device=like.device)[:, None]
    column = torch.arange(columns.start, columns.stop, device=like.device)[None]
    allowed = ((column <= row) & (row - column < window))[None, None]
    if not is_additive:
        return allowed
    return torch.zeros_like(allowed, dtype=like.dtype).masked_fill(~allowed, torch.finfo(like.dtype).min)


def no_attention_mask(device: torch.device) -> Tensor:
    """Return a mask of four dimensions, which transformers passes on instead of making one of [T, T].

    It is empty, so that a foreign attention that uses it fails; with a valid mask, sequences could see each other.
    """
    return torch.empty(1, 1, 1, 0, dtype=torch.bool, device=device)


def own_attention(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return transformers' function for ``attn_implementation=name``; "eager" is in the model's own file."""
    if name != "eager":
        return ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-any-return]
    files = (sys.modules[cls.__module__] for cls in type(module).__mro__)
    found = next((file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward")), None)
    if found is None:
        raise UnsupportedError("packed attention", f"the file of {type(module).__name__} has no eager attention")
    return found  # type: ignore[no-any-return]


def cast_alike(*tensors: Tensor) -> list[Tensor]:
    """Cast as autocast does for scaled_dot_product_attention: rotary embeddings return float32 queries and keys."""
    dtype = attention_dtype(tensors[0].device.type, tensors[0].dtype)
    return [tensor.to(dtype) for tensor in tensors]


def attention_dtype(device_type: str, query_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which attention computes for queries of ``query_dtype``."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else query_dtype


def prepare_flex(packed: PackedSequences, windows: Iterable[int | None]) -> None:
    """Make the masks of these windows, because making them in compiled code would break its graph."""
    for window in windows:
        _block_mask(packed, window)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _block_mask(packed: PackedSequences, window: int | None) -> BlockMask:
    """Return the mask of ``create_block_mask`` without its work on [T, T]: a token sees its sequence up to itself.

    Letters: B blocks of tokens.
    """
    device, total = packed.cu_seqlens.device, sum(packed.lengths)
    token_T = torch.arange(total, device=device)
    sequence_T = torch.searchsorted(packed.cu_seqlens[1:], token_T, right=True)

    def mask_mod(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        seen = (sequence_T[row] == sequence_T[column]) & (column <= row)
        return seen if window is None else seen & (row - column < window)

    first_T = packed.cu_seqlens[sequence_T]
    if window is not None:
        first_T = torch.maximum(first_T, token_T - window + 1)
    column_B = token_T[::_BLOCK]
    row_B = column_B[:, None]
    last_B = (row_B + _BLOCK - 1).clamp(max=total - 1)
    seen_BB = (column_B <= row_B) & (column_B + _BLOCK > first_T[row_B])
    whole_BB = (column_B < row_B) & (column_B >= first_T[last_B]) & (row_B + _BLOCK <= total)
    blocks = *_listed(seen_BB & ~whole_BB), *_listed(whole_BB)
    mask = BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=_BLOCK, mask_mod=mask_mod, seq_lengths=(total, total))
    return packed.block_masks.setdefault(window, mask)


_BLOCK = 128
"""Tokens in a block, flex attention's default."""


def _listed(is_there_BB: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of columns in each row, and the column indices with those of the row first."""
    columns_BB = is_there_BB.int().argsort(dim=-1, descending=True, stable=True).int()
    return is_there_BB.sum(-1, dtype=torch.int32)[None, None], columns_BB[None, None]
