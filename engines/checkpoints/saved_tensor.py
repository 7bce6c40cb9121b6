"""Tensors in safetensors files, each in parts that several workers have written; read by the slice.

The files are those of torch's ``HuggingFaceStorageWriter``: where in the whole tensor a part begins is in their
metadata, and torch's own ``HuggingFaceStorageReader`` reads them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from rlcore.engines.checkpoints.tensor_file import file_order, host_pieces, write_tensors
from rlcore.engines.sharding import is_first_copy, local_part, own_box

_OFFSETS = "DCP_SHARDING_INFO"
_METADATA = {"DCP_VERSION": "1.0", "format": "pt"}
OF_EACH_RANK = "rank-"
"""Start of the names of tensors that each rank has for itself."""


class _Offsets(msgspec.Struct):
    saved_offsets: list[int]


class Part(NamedTuple):
    """What one rank holds of a tensor."""

    tensor: Tensor
    """Contiguous."""
    offset: list[int]
    """Of its first element in the whole tensor."""


class SavedTensor:
    """One tensor, whole or in parts."""

    def __init__(self) -> None:
        self._parts: list[tuple[list[int], Any]] = []

    def add_part(self, offset: list[int], found: Any) -> None:
        self._parts.append((offset, found))

    @property
    def shape(self) -> torch.Size:
        ends = [_end(offset, found) for offset, found in self._parts]
        return torch.Size(map(max, *ends) if len(ends) > 1 else ends[0])

    def read(self, box: tuple[slice, ...] | None = None) -> Tensor:
        """That slice of every dimension (None is all), in the dtype of the file, in memory of its own."""
        wanted = box or tuple(slice(0, size) for size in self.shape)
        if not wanted:
            scalar: Tensor = self._parts[0][1][...]
            return scalar.clone()
        result: Tensor | None = None
        for offset, found in self._parts:
            common = [
                (max(side.start, start), min(side.stop, end))
                for side, start, end in zip(wanted, offset, _end(offset, found), strict=True)
            ]
            is_here = all(start < stop for start, stop in common)
            if result is None:
                sizes = [side.stop - side.start for side in wanted]
                result = torch.empty(sizes, dtype=found[:0].dtype)
            if is_here:
                here = tuple(slice(a - side.start, b - side.start) for (a, b), side in zip(common, wanted, strict=True))
                there = tuple(slice(a - start, b - start) for (a, b), start in zip(common, offset, strict=True))
                result[here] = found[there]
        assert result is not None
        return result


def _end(offset: list[int], found: Any) -> list[int]:
    return [start + size for start, size in zip(offset, found.get_shape(), strict=True)]


def parts_of(named: Mapping[str, Tensor]) -> dict[str, Part]:
    """What this rank holds of each tensor and is to write: nothing of those that another rank holds too and writes."""
    own = {
        name: Part(local_part(tensor.detach()).contiguous(), [side.start for side in own_box(tensor)])
        for name, tensor in named.items()
        if is_first_copy(tensor) or name.startswith(OF_EACH_RANK)
    }
    return dict(sorted(own.items(), key=lambda item: file_order((item[0], (item[1].tensor.dtype, ())))))


def write_parts(
    file: Path, parts: Mapping[str, Part], pieces: Callable[[Tensor], Iterable[Tensor]] = host_pieces
) -> None:
    """Write what ``parts_of`` gave.

    Args:
        pieces: the bytes of each tensor, which are asked for in the order of ``parts``.
    """
    layouts = {name: (part.tensor.dtype, part.tensor.shape) for name, part in parts.items()}
    offsets = msgspec.json.encode({name: _Offsets(part.offset) for name, part in parts.items()}).decode()
    stream = (piece for part in parts.values() for piece in pieces(part.tensor))
    write_tensors(file, layouts, stream, _METADATA | {_OFFSETS: offsets})


def open_parts(files: Iterable[Path]) -> dict[str, SavedTensor]:
    """The tensors of several files by name; nothing of them is read yet."""
    from safetensors import safe_open

    found: dict[str, SavedTensor] = {}
    for file in files:
        opened: Any = safe_open(file, framework="pt", device="cpu")
        offsets = msgspec.json.decode((opened.metadata() or {}).get(_OFFSETS, "{}"), type=dict[str, _Offsets])
        for name, part in offsets.items():
            found.setdefault(name, SavedTensor()).add_part(part.saved_offsets, opened.get_slice(name))
    return found
