"""Conversion of padded batches to packed ones and back, and even micro-batches of sequences of uneven length.

A padded batch has ``attention_mask`` [N, L] and per-token entries [N, L, ...]. A packed one has ``cu_seqlens``
[N + 1] int32 (where each sequence begins, then the end) and per-token entries [T, ...]. Other entries (one value for
each sequence, or a scalar) are the same in both.

Karmarkar-Karp: "The differencing method of set partitioning", 1982.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from rlcore.arguments import LIST, TEXT, WHOLE, Kind, kind_of, optional, takes
from rlcore.errors import InvalidInputError
from rlcore.kernels.cu_seqlens import rising_edges
from rlcore.kernels.operands import TENSOR, TENSORS, check_binary, check_tensor

_LENGTHS = Kind(
    "whole numbers in a list, array or tensor", lambda value: isinstance(value, Iterable) and not TEXT.has(value)
)
_FILL = kind_of("a mapping of names to numbers", Mapping)
_BINS = Kind("lists of indices in a list", lambda value: LIST.has(value) and all(map(LIST.has, value)))
_NAMES = Kind("a list, tuple or set of names", lambda value: isinstance(value, Collection) and not TEXT.has(value))


@takes("pack", batch=TENSORS)
def pack(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop the padding: per-token entries become [T, ...], in order, and ``cu_seqlens`` replaces
    ``attention_mask``.

    The padding may be on either side. Works under autograd.

    Raises:
        InvalidInputError: no ``attention_mask`` [N, L], ``cu_seqlens`` beside it, or an entry of another shape.
    """
    _check_tensors("pack", batch)
    mask = batch.get("attention_mask")
    if mask is None or mask.dim() != 2:
        got = sorted(batch) if mask is None else f"attention_mask {list(mask.shape)}"
        raise InvalidInputError(f"pack needs a batch with attention_mask [N, L]; got {got}")
    check_binary("pack: attention_mask", mask)
    if "cu_seqlens" in batch:
        raise InvalidInputError("pack: cu_seqlens is what pack makes of attention_mask; the batch must not have it too")
    for name, values in batch.items():
        if values.dim() > 0 and values.shape[:2] != (mask.shape if values.dim() > 1 else mask.shape[:1]):
            raise InvalidInputError(
                f"pack: {name} must be one entry for each token, {list(mask.shape)} like attention_mask, one value "
                f"for each sequence, [{len(mask)}], or a scalar; got {list(values.shape)}"
            )
    is_token_NL = mask != 0
    edges_N = torch.nn.functional.pad(is_token_NL.sum(1).cumsum(0), (1, 0))
    # Once for all entries, and by this thread alone: values[is_token_NL] would wake every thread of a host for each,
    # and on a device wait for it each time.
    token_T = is_token_NL.flatten().nonzero().squeeze(1)
    packed = {
        name: values.flatten(0, 1).index_select(0, token_T.to(values.device)) if values.dim() > 1 else values
        for name, values in batch.items()
        if name != "attention_mask"
    }
    return {**packed, "cu_seqlens": edges_N.to(torch.int32)}


@takes("unpack", batch=TENSORS, length=optional(WHOLE), fill=optional(_FILL), per_sequence=optional(_NAMES))
def unpack(
    batch: Mapping[str, Tensor],
    *,
    length: int | None = None,
    side: Literal["left", "right"] = "right",
    fill: Mapping[str, float] | None = None,
    per_sequence: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Undo ``pack``: per-token entries become [N, L, ...] with padding on ``side``.

    An entry is per token if its first dimension is T.

    Args:
        batch: packed, with ``cu_seqlens``.
        length: L; None is the longest sequence.
        side: where the padding goes.
        fill: by name, the value of the padding of per-token entries; 0 for those not named.
        per_sequence: names of entries that have a value for each sequence, () if there are none. It is needed only
            where a batch has as many tokens as sequences.

    Raises:
        InvalidInputError: no ``cu_seqlens``, a ``length`` too short, an entry that begins with neither tokens nor
            sequences, or could be either, or a name in ``fill`` of no per-token entry.
    """
    _check_tensors("unpack", batch)
    edges = _edges(batch)
    count_N = edges.diff()
    longest = int(count_N.max()) if len(count_N) else 0
    length = longest if length is None else length
    if length < longest:
        raise InvalidInputError(f"unpack: length={length} is below the longest sequence, {longest} tokens")
    if side not in ("left", "right"):
        raise InvalidInputError(f"unpack: side must be 'left' or 'right'; got {side!r}")
    column_L = torch.arange(length, device=edges.device)
    is_token_NL = column_L < count_N[:, None] if side == "right" else column_L >= length - count_N[:, None]
    num_tokens = int(edges[-1])
    entries = {name: values for name, values in batch.items() if name != "cu_seqlens"}
    per_token = _per_token(entries, num_tokens, len(count_N), per_sequence)
    held = dict.fromkeys(per_token, 0.0) | dict(fill or {})
    if unknown := [name for name in held if name not in per_token]:
        raise InvalidInputError(
            f"unpack: fill names {unknown[0]!r}, which is no per-token entry; did you mean one of {sorted(per_token)}?"
        )
    padded = {name: _scatter(values, is_token_NL, held[name]) for name, values in per_token.items()}
    return {"attention_mask": is_token_NL.long(), **entries, **padded}


def _per_token(
    entries: Mapping[str, Tensor], num_tokens: int, num_sequences: int, per_sequence: Collection[str] | None
) -> dict[str, Tensor]:
    found = {}
    for name, values in entries.items():
        if values.dim() == 0 or name in (per_sequence or ()):
            continue
        if len(values) not in (num_tokens, num_sequences):
            raise InvalidInputError(
                f"unpack: {name} must begin with the {num_tokens} tokens or the {num_sequences} sequences; "
                f"got {list(values.shape)}"
            )
        if num_tokens == num_sequences > 0 and per_sequence is None:
            raise InvalidInputError(
                f"unpack: {name} {list(values.shape)} may be of the {num_tokens} tokens or of as many sequences; name "
                "the entries of sequences in per_sequence=, () if there are none"
            )
        if len(values) == num_tokens:
            found[name] = values
    return found


def _check_tensors(operator: str, batch: Mapping[str, Tensor]) -> None:
    for name, values in batch.items():
        check_tensor(f"{operator}: {name}", values)


def _edges(batch: Mapping[str, Tensor]) -> Tensor:
    if "cu_seqlens" not in batch:
        raise InvalidInputError(f"unpack needs a batch with cu_seqlens [N + 1]; got {sorted(batch)}")
    return rising_edges("unpack: cu_seqlens", batch["cu_seqlens"])


def _scatter(values_T: Tensor, is_token_NL: Tensor, fill: float) -> Tensor:
    padded_NL = values_T.new_full((*is_token_NL.shape, *values_T.shape[1:]), fill)
    return padded_NL.index_put((is_token_NL.to(values_T.device),), values_T)


@takes("position_ids", cu_seqlens=TENSOR)
def position_ids(cu_seqlens: Tensor) -> Tensor:
    """Return [T] int64: the position of each token in its own sequence.

    Raises:
        InvalidInputError: ``cu_seqlens`` that are no integers, or do not rise from 0.
    """
    edges_N = rising_edges("position_ids: cu_seqlens", cu_seqlens)
    start_T = edges_N[:-1].repeat_interleave(edges_N.diff())
    return torch.arange(len(start_T), device=edges_N.device) - start_T


@takes("balance", lengths=_LENGTHS, max_tokens=optional(WHOLE), num_bins=optional(WHOLE))
def balance(
    lengths: Sequence[int] | Tensor, *, max_tokens: int | None = None, num_bins: int | None = None
) -> list[list[int]]:
    """Return the indices of sequences, in micro-batches of about equal token counts.

    The same input gives the same result.

    Args:
        lengths: tokens of each sequence.
        max_tokens: a limit for each micro-batch; as few as first-fit decreasing needs (at most 11/9 of the
            optimum, rounded up).
        num_bins: exactly so many, made even by Karmarkar-Karp differencing; some are empty if sequences are fewer.

    Raises:
        InvalidInputError: lengths that are no whole numbers, not exactly one of the two limits, or a sequence longer
            than ``max_tokens``.
    """
    tokens = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    if wrong := [length for length in tokens if not (WHOLE.has(length) and length >= 0)]:
        raise InvalidInputError(f"balance: lengths must be whole numbers >= 0; got {wrong[0]!r}")
    tokens = [int(length) for length in tokens]  # numpy's own would overflow
    if max_tokens is not None and num_bins is None:
        return _first_fit_decreasing(tokens, max_tokens)
    if num_bins is not None and max_tokens is None:
        return _karmarkar_karp(tokens, num_bins)
    raise InvalidInputError(
        f"balance needs max_tokens or num_bins, one of them; got max_tokens={max_tokens}, num_bins={num_bins}"
    )


@takes("inverse_permutation", bins=_BINS)
def inverse_permutation(bins: Sequence[Sequence[int]]) -> list[int]:
    """Return the place of each index in the joined bins: ``joined[inverse[i]]`` belongs to sequence i.

    Raises:
        InvalidInputError: an index that is missing, or there twice.
    """
    place_of = {index: place for place, index in enumerate(index for one in bins for index in one)}
    num_indices = sum(map(len, bins))
    if missing := [index for index in range(num_indices) if index not in place_of]:
        raise InvalidInputError(
            f"inverse_permutation: bins must hold each of 0 to {num_indices - 1} once; {missing[0]} is missing"
        )
    return [place_of[index] for index in range(num_indices)]


def _first_fit_decreasing(tokens: list[int], max_tokens: int) -> list[list[int]]:
    """Fill the first bin that has room, found in a tree: the room of a node is that of its emptier half."""
    size = 1 << (len(tokens) - 1).bit_length() if tokens else 1
    bins: list[list[int]] = [[] for _ in range(size)]
    room = [max_tokens] * (2 * size)
    for index in sorted(range(len(tokens)), key=lambda index: -tokens[index]):
        length = tokens[index]
        if length > max_tokens:
            raise InvalidInputError(
                f"balance: sequence {index} has {length} tokens, more than max_tokens={max_tokens}; "
                "raise max_tokens or shorten it"
            )
        node = 1
        while node < size:
            node *= 2
            node += room[node] < length
        bins[node - size].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [sorted(one) for one in bins if one]


def _karmarkar_karp(tokens: list[int], num_bins: int) -> list[list[int]]:
    """Join the two most uneven partial solutions, the fullest bin of one with the emptiest of the other.

    Bins that are still empty are left out.
    """
    if num_bins < 1:
        raise InvalidInputError(f"balance: num_bins must be >= 1; got {num_bins}")
    Partial = list[tuple[int, list[int]]]  # bins as (tokens, indices), fullest first
    heap: list[tuple[int, int, Partial]] = []
    for index, length in enumerate(tokens):
        solution: Partial = [(length, [index])]
        heap.append((-_spread(solution, num_bins), index, solution))
    heapq.heapify(heap)
    for serial in range(len(tokens), 2 * len(tokens) - 1):
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        apart, rising = num_bins - len(other), other[::-1]  # so many of the fullest are joined with an empty bin
        pairs = zip(one[apart:], rising, strict=False)
        joined = [(full + empty, more + less) for (full, more), (empty, less) in pairs]
        joined = [*one[:apart], *joined, *rising[len(joined) :]]
        joined.sort(key=lambda entry: -entry[0])
        heapq.heappush(heap, (-_spread(joined, num_bins), serial, joined))
    bins = [sorted(indices) for _, indices in heap[0][2]] if heap else []
    return bins + [[] for _ in range(num_bins - len(bins))]


def _spread(solution: list[tuple[int, list[int]]], num_bins: int) -> int:
    return solution[0][0] - (solution[-1][0] if len(solution) == num_bins else 0)
