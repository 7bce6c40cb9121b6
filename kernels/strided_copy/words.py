"""Strided copies in words: each piece in as few dimensions as possible, in the largest words that both its ends allow.

A word is up to 16 bytes that are neighbours at both ends, so that a thread moves it at once. Where the dtype changes, a
word is some elements. Pieces of one kind (word and number of dimensions) make a table with a row for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlcore.kernels.strided_copy.op import StridedPiece

WIDEST = 16
"""The most bytes that one instruction loads or stores."""
MOST_DIMS = 4
_MOST_WORDS = 2**30
"""The most words of a row of the table: their numbers have 32 bits in the kernel."""


class CopyKind(NamedTuple):
    """The properties of pieces that a kernel is compiled for."""

    source: torch.dtype
    destination: torch.dtype
    lanes: int
    """Elements of a word."""
    num_dims: int


class WordCopy(NamedTuple):
    """A piece in words; offsets in bytes, strides in words."""

    source: int
    destination: int
    source_byte: int
    byte: int
    sizes: tuple[int, ...]
    source_strides: tuple[int, ...]
    strides: tuple[int, ...]


class CopyTable(NamedTuple):
    """Rows of one kind, as columns."""

    kind: CopyKind
    source: np.ndarray
    """[R] index of the tensor, as ``destination`` is."""
    destination: np.ndarray
    bytes: np.ndarray
    """[R, 2] offset in the source and in the destination."""
    num_words: np.ndarray
    """[R]"""
    dims: np.ndarray
    """[R, 3, num_dims]: sizes, strides of the source, strides of the destination; the innermost last."""


def tables(
    pieces: Iterable[StridedPiece], sources: Sequence[Tensor], destinations: Sequence[Tensor]
) -> list[CopyTable]:
    """Return the tables of all pieces that are not empty."""
    rows: dict[CopyKind, list[WordCopy]] = {}
    ends = [[(tensor.dtype, tensor.data_ptr() % WIDEST) for tensor in side] for side in (sources, destinations)]
    for piece in pieces:
        for part in _parts(_dims(piece), piece.source_offset, piece.offset):
            kind, row = _row(piece, part, ends[0][piece.source], ends[1][piece.destination])
            rows.setdefault(kind, []).append(row)
    return [_table(kind, group) for kind, group in rows.items()]


class _PiecePart(NamedTuple):
    source_offset: int
    offset: int
    dims: list[tuple[int, int, int]]
    """(stride, stride of the source, size), the widest first."""


def _dims(piece: StridedPiece) -> list[tuple[int, int, int]]:
    merged: list[tuple[int, int, int]] = []
    for stride, source_stride, size in sorted(zip(piece.stride, piece.source_stride, piece.shape, strict=True))[::-1]:
        if merged and merged[-1][:2] == (stride * size, source_stride * size):
            merged[-1] = (stride, source_stride, size * merged[-1][2])
        elif size != 1:
            merged.append((stride, source_stride, size))
    return merged


def _parts(dims: list[tuple[int, int, int]], source_offset: int, offset: int) -> Iterable[_PiecePart]:
    """Cut along the widest dimension until it has few enough elements and dimensions."""
    numel = 1
    for _, _, size in dims:
        numel *= size
    if not numel:
        return
    if len(dims) <= MOST_DIMS - 1 and numel <= _MOST_WORDS:
        yield _PiecePart(source_offset, offset, dims)
        return
    stride, source_stride, size = dims[0]
    inner = numel // size
    count = max(1, _MOST_WORDS // inner) if len(dims) <= MOST_DIMS - 1 else 1
    for first in range(0, size, count):
        rest = min(count, size - first)
        part = ([(stride, source_stride, rest)] if rest > 1 else []) + dims[1:]
        yield from _parts(part, source_offset + first * source_stride, offset + first * stride)


def _row(
    piece: StridedPiece, part: _PiecePart, source: tuple[torch.dtype, int], destination: tuple[torch.dtype, int]
) -> tuple[CopyKind, WordCopy]:
    (source_dtype, source_address), (dtype, address) = source, destination
    source_byte, byte = part.source_offset * source_dtype.itemsize, part.offset * dtype.itemsize
    outer, run = (part.dims[:-1], part.dims[-1][2]) if part.dims and part.dims[-1][:2] == (1, 1) else (part.dims, 1)
    lanes = WIDEST // min(source_dtype.itemsize, dtype.itemsize)
    ends = [run, *(stride for strides in outer for stride in strides[:2])]
    while lanes > 1 and (
        any(end % lanes for end in ends)
        or (source_address + source_byte) % min(WIDEST, lanes * source_dtype.itemsize)
        or (address + byte) % min(WIDEST, lanes * dtype.itemsize)
    ):
        lanes //= 2
    dims = [(s // lanes, d // lanes, n) for d, s, n in outer] + [(1, 1, run // lanes)]
    kind = _kind(source_dtype, dtype, lanes, len(dims))
    source_strides, strides, sizes = zip(*dims, strict=True)
    return kind, WordCopy(piece.source, piece.destination, source_byte, byte, sizes, source_strides, strides)


def _kind(source: torch.dtype, destination: torch.dtype, lanes: int, num_dims: int) -> CopyKind:
    if source != destination:
        return CopyKind(source, destination, lanes, num_dims)
    nbytes = lanes * source.itemsize  # only bits are moved
    if nbytes == WIDEST:
        return CopyKind(torch.int32, torch.int32, 4, num_dims)
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[nbytes]
    return CopyKind(whole, whole, 1, num_dims)


def _table(kind: CopyKind, rows: list[WordCopy]) -> CopyTable:
    dims = np.array([(row.sizes, row.source_strides, row.strides) for row in rows], dtype=np.int64)
    return CopyTable(
        kind,
        np.array([row.source for row in rows]),
        np.array([row.destination for row in rows]),
        np.array([(row.source_byte, row.byte) for row in rows], dtype=np.int64),
        dims[:, 0].prod(1),
        dims,
    )
