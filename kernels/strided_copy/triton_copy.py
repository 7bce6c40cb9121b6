# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""``strided_copy`` in Triton: one launch for all pieces of a kind, from a table on the device.

The work is cut into tiles of equal size, however large the pieces are. Each program takes a run of tiles that follow
each other, and steps from a piece to the next. From a word's number within its piece the program computes its index in
each dimension by division, and from those its place at both ends.

A row of the table: address of the source, address of the destination, first tile, words, sizes, strides of the source,
strides of the destination.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from rlcore.kernels.strided_copy.op import PreparedCopies, StridedPiece, ViewCopies
from rlcore.kernels.strided_copy.words import WIDEST, CopyKind, CopyTable, tables

_HEAD = tl.constexpr(4)
"""Columns before the dimensions."""
_TILE_BYTES = 1 << 14
_NUM_WARPS = 4
_PROGRAMS_PER_CORE = 8

_TYPES = {
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


@triton.jit
def _copy_kernel(
    table, first_rows, num_tiles,
    SOURCE: tl.constexpr, DESTINATION: tl.constexpr, LANES: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr,
    SOURCE_ALIGNMENT: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = _HEAD + 3 * DIMS
    per_program = tl.cdiv(num_tiles, tl.num_programs(0))
    tile = tl.program_id(0) * per_program
    end = tl.minimum(tile + per_program, num_tiles)
    row = table + tl.load(first_rows + tl.program_id(0)).to(tl.int64) * COLUMNS
    lane = tl.arange(0, LANES)
    while tile < end:
        while tl.load(row + COLUMNS + 2) <= tile:
            row += COLUMNS
        source = tl.multiple_of(tl.load(row).to(tl.pointer_type(SOURCE)), SOURCE_ALIGNMENT)
        destination = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(DESTINATION)), ALIGNMENT)
        word = (tile - tl.load(row + 2)).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
        is_word = word < tl.load(row + 3)
        if DIMS == 1:
            at = word.to(tl.int64)
            source_at = at
        else:
            at = tl.zeros([BLOCK], tl.int64)
            source_at = tl.zeros([BLOCK], tl.int64)
            rest = word
            for inner in tl.static_range(DIMS):
                dim = row + _HEAD + DIMS - 1 - inner
                size = tl.load(dim).to(tl.int32)
                digit = rest
                if inner < DIMS - 1:
                    rest = rest // size
                    digit -= rest * size
                source_at += digit.to(tl.int64) * tl.load(dim + DIMS)
                at += digit.to(tl.int64) * tl.load(dim + 2 * DIMS)
        values = tl.load(source + (source_at[:, None] * LANES + lane[None, :]), mask=is_word[:, None])
        tl.store(destination + (at[:, None] * LANES + lane[None, :]), values.to(DESTINATION), mask=is_word[:, None])
        tile += 1


class _Addresses(NamedTuple):
    sources: np.ndarray
    destinations: np.ndarray

    @classmethod
    def of(cls, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> _Addresses:
        return cls(*(np.array([tensor.data_ptr() for tensor in side], np.int64) for side in (sources, destinations)))

    def are_aligned_as(self, other: _Addresses) -> bool:
        return all(np.array_equal(one % WIDEST, two % WIDEST) for one, two in zip(self, other, strict=True))


class TritonCopies(PreparedCopies):
    """A launch for each kind of piece. Pieces from another device, or of other dtypes, are copied as views."""

    _ends: _Addresses
    _launches: list[_TableLaunch]

    def __init__(
        self, pieces: Sequence[StridedPiece], sources: Sequence[Tensor], destinations: Sequence[Tensor]
    ) -> None:
        self._device = destinations[0].device if destinations else torch.device("cpu")
        own: list[StridedPiece] = []
        others: list[StridedPiece] = []
        for piece in pieces:
            source = sources[piece.source]
            dtypes = source.dtype, destinations[piece.destination].dtype
            is_own = source.device == self._device and (dtypes[0] == dtypes[1] or _TYPES.keys() >= set(dtypes))
            (own if is_own else others).append(piece)
        self._pieces = own
        self._views = ViewCopies(others, sources, destinations)
        self._make(sources, destinations)

    def rebind(self, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
        self._views.rebind(sources, destinations)
        ends = _Addresses.of(sources, destinations)
        if not ends.are_aligned_as(self._ends):
            self._make(sources, destinations)
            return
        self._tensors, self._ends = (*sources, *destinations), ends
        for launch in self._launches:
            launch.write_addresses(ends)

    def _make(self, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
        self._tensors = (*sources, *destinations)  # keeps alive the memory that is read and written
        self._ends = _Addresses.of(sources, destinations)
        self._launches = [_TableLaunch(table, self._device) for table in tables(self._pieces, sources, destinations)]
        for launch in self._launches:
            launch.write_addresses(self._ends)

    def run(self) -> None:
        with torch.accelerator.device_index(self._device.index):
            for launch in self._launches:
                launch.run()
        self._views.run()


class _TableLaunch:
    """All pieces of one kind."""

    def __init__(self, table: CopyTable, device: torch.device) -> None:
        kind = table.kind
        self._table, self._device = table, device
        self._options = compile_options(kind)
        tiles = -(-table.num_words // self._options["BLOCK"])
        first_tiles = np.concatenate([[0], np.cumsum(tiles)])
        self._num_tiles = int(first_tiles[-1])
        self._num_programs = min(self._num_tiles, _num_programs(device))
        per_program = -(-self._num_tiles // self._num_programs)
        starts = np.minimum(np.arange(self._num_programs) * per_program, self._num_tiles - 1)
        first_rows = np.searchsorted(first_tiles, starts, side="right") - 1
        rows = np.zeros((len(tiles) + 1, _HEAD.value + 3 * kind.num_dims), dtype=np.int64)  # the last has no words
        rows[:, 2] = first_tiles
        rows[:-1, 3] = table.num_words
        rows[:-1, _HEAD.value :] = table.dims.reshape(len(tiles), -1)
        self._rows = torch.from_numpy(rows)
        self._first_rows = torch.from_numpy(first_rows.astype(np.int32)).to(device)

    def write_addresses(self, ends: _Addresses) -> None:
        rows = self._rows.numpy()
        rows[:-1, 0] = ends.sources[self._table.source] + self._table.bytes[:, 0]
        rows[:-1, 1] = ends.destinations[self._table.destination] + self._table.bytes[:, 1]
        self._on_device = self._rows.to(self._device)

    def run(self) -> None:
        _copy_kernel[(self._num_programs,)](self._on_device, self._first_rows, self._num_tiles, **self._options)


def compile_options(kind: CopyKind) -> dict[str, Any]:
    """Return the constants of a kernel for one kind of piece."""
    source, destination = kind.source.itemsize * kind.lanes, kind.destination.itemsize * kind.lanes
    return {
        "SOURCE": _TYPES[kind.source],
        "DESTINATION": _TYPES[kind.destination],
        "LANES": kind.lanes,
        "DIMS": kind.num_dims,
        "BLOCK": min(1024, _TILE_BYTES // max(source, destination)),
        "SOURCE_ALIGNMENT": min(WIDEST, source),
        "ALIGNMENT": min(WIDEST, destination),
        "num_warps": _NUM_WARPS,
    }


@functools.cache
def _num_programs(device: torch.device) -> int:
    if triton.knobs.runtime.interpret:
        return 3
    count: int = torch.get_device_module(device).get_device_properties(device).multi_processor_count
    return count * _PROGRAMS_PER_CORE
