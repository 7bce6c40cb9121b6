"""Destinations that an engine holds in float8: what the loader copies into them is quantised on its way.

The trace is of a model in the engine's own dtype. A destination of it that the engine has quantised since is written by
rows: every row of the matrices comes from one tensor of a sender, in which it lies in one piece.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rlcore.engines.weight_sync.planning.bound_tensors import BoundTensors
from rlcore.engines.weight_sync.planning.loader_trace import Destination
from rlcore.engines.weight_sync.planning.plan import SyncPlan
from rlcore.engines.weight_sync.planning.strided_copy import Copy, canonical, dense
from rlcore.errors import InvalidInputError
from rlcore.kernels.strided_copy.quantized import QuantizedCopies, QuantizedMatrices, RowSegment, check_segments

Quantized = Mapping[str, QuantizedMatrices]
"""The matrices of each quantised destination, by its name in the trace."""


def quantized_misfits(plan: SyncPlan, quantized: Quantized) -> dict[str, str]:
    """Return the destinations of a plan that are quantised and cannot be written by rows, and why."""
    found: dict[str, str] = {}
    filled = {one.destination for one in plan.fills}
    by_destination = plan.by_destination()
    for number, destination in enumerate(plan.destinations):
        if (matrices := quantized.get(destination.name)) is None:
            continue
        if number in filled:
            found[destination.name] = "its loader fills some of it with a constant, and the engine has it in float8"
        elif reason := _misfit(destination, matrices):
            found[destination.name] = reason
        else:
            copies = [piece.copy for piece in by_destination.get(number, [])]
            try:
                check_segments([one for copy in copies for one in row_segments(0, copy, matrices.columns)], matrices)
            except InvalidInputError as error:
                found[destination.name] = f"it does not come in whole rows: {error}"
    return found


def _misfit(destination: Destination, matrices: QuantizedMatrices) -> str:
    shape = (matrices.count, matrices.rows, matrices.columns)
    is_alike = destination.shape in (shape, shape[1:]) and destination.numel == math.prod(shape)
    if is_alike and destination.stride == dense(destination.shape):
        return ""
    return f"it is {list(shape)} in the engine and {list(destination.shape)} in its loader"


def row_segments(source: int, copy: Copy, columns: int) -> list[RowSegment]:
    """Return the rows that a copy writes into a dense destination of rows of so many columns.

    Raises:
        InvalidInputError: it writes parts of rows.
    """
    shape, source_offset, source_stride, offset, stride = canonical(copy)
    *outer, width = shape or (1,)
    is_whole = bool(shape) and (stride[-1], source_stride[-1]) == (1, 1) and not (width % columns or offset % columns)
    if not is_whole or any(step % columns for step in stride[:-1]):
        raise InvalidInputError(f"a copy of shape {list(shape)} to strides {list(stride)} has parts of rows")
    num_rows, row_stride = width // columns, columns
    if num_rows == 1 and outer and stride[-2] == columns:  # rows that lie further apart in the source
        num_rows, row_stride = outer.pop(), source_stride[-2]
    return [
        RowSegment(
            (offset + sum(i * step for i, step in zip(index, stride, strict=False))) // columns,
            num_rows,
            source,
            source_offset + sum(i * step for i, step in zip(index, source_stride, strict=False)),
            row_stride,
        )
        for index in itertools.product(*map(range, outer))
    ]


class QuantizedExecution:
    """The quantising copies of a list of pieces: made ready by the first run, and again where a tensor has moved.

    Args:
        pieces: source, name of the destination, and copy of each.
    """

    def __init__(self, pieces: Sequence[tuple[Any, str, Copy]]) -> None:
        self._pieces: dict[str, list[tuple[Any, Copy]]] = {}
        for source, destination, copy in pieces:
            self._pieces.setdefault(destination, []).append((source, copy))
        self._from = BoundTensors(list(dict.fromkeys(source for source, _, _ in pieces)))
        self._to = BoundTensors([(name, end) for name in self._pieces for end in ("weight", "scale")])
        self._copies: list[QuantizedCopies] = []

    def run(self, sources: Mapping[Any, Tensor], quantized: Quantized) -> None:
        """Queue all copies on the current stream.

        Args:
            sources: by the pieces' source. The very mapping of the last run says that no tensor has moved.
        """
        if not self._pieces:
            return
        own = {name: quantized[name] for name in self._pieces}
        ends = {(name, end): getattr(matrices, end) for name, matrices in own.items() for end in ("weight", "scale")}
        have_moved = [self._from.find(sources), self._to.find(ends)]
        if any(have_moved):
            self._copies = []  # they are kept only if they could be made ready
        if not self._copies:
            self._copies = [_made_ready(pieces, sources, own[name]) for name, pieces in self._pieces.items()]
        for copies in self._copies:
            copies.run()


def _made_ready(
    pieces: Sequence[tuple[Any, Copy]], sources: Mapping[Any, Tensor], matrices: QuantizedMatrices
) -> QuantizedCopies:
    names = list(dict.fromkeys(source for source, _ in pieces))
    segments = [
        segment for source, copy in pieces for segment in row_segments(names.index(source), copy, matrices.columns)
    ]
    return QuantizedCopies(segments, [sources[name] for name in names], matrices)
