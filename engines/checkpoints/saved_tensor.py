"""Tensors in safetensors files, in parts that several workers have written, and read by the slice.

The files are those of torch's ``HuggingFaceStorageWriter``: their metadata say where in the whole tensor a part begins.
Torch's own ``HuggingFaceStorageReader`` reads them too.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from rlcore.engines.checkpoints.damage import DamageError, damage_of
from rlcore.engines.checkpoints.tensor_file import Stamp, TensorFile, file_order, host_pieces, write_tensors
from rlcore.nn import safetensors_library
from rlcore.weights.shards import is_first_copy, local_part, own_box

_OFFSETS = "DCP_SHARDING_INFO"
_SHAPES = "rlcore.shapes"
"""The shapes of the whole tensors, by name."""
_METADATA = {"DCP_VERSION": "1.0", "format": "pt"}
OF_EACH_RANK = "rank-"
"""The start of the names of tensors that each rank has for itself."""


class _Offsets(msgspec.Struct):
    saved_offsets: list[int]


class TensorPart(NamedTuple):
    """The part of a tensor that one rank holds."""

    tensor: Tensor
    """Contiguous."""
    offset: list[int]
    """The index of its first element in the whole tensor."""
    shape: Sequence[int]
    """The shape of the whole tensor."""


class SavedTensor:
    """One tensor, whole or in parts."""

    def __init__(self) -> None:
        self._parts: list[tuple[list[int], Any]] = []
        self._shapes: set[tuple[int, ...]] = set()

    def add_part(self, offset: list[int], shape: Sequence[int] | None, found: object) -> None:
        """Add a part; ``shape`` is that of the whole tensor, None in files that do not have it."""
        self._parts.append((offset, found))
        if shape is not None:
            self._shapes.add(tuple(shape))

    @property
    def shape(self) -> torch.Size:
        if self._shapes:
            return torch.Size(next(iter(self._shapes)))
        ends = [_end(offset, found) for offset, found in self._parts]
        return torch.Size(map(max, *ends) if len(ends) > 1 else ends[0])

    @property
    def dtype(self) -> torch.dtype:
        _, found = self._parts[0]
        dtype: torch.dtype = found[:0].dtype if found.get_shape() else found[...].dtype
        return dtype

    def is_whole(self) -> bool:
        """Return True if the parts agree on what the tensor is, and cover every element exactly once."""
        if len(self._shapes) > 1 or len({found.get_dtype() for _, found in self._parts}) > 1:
            return False
        return covers_once(self.shape, [(offset, _end(offset, found)) for offset, found in self._parts])

    def read(self, box: tuple[slice, ...] | None = None) -> Tensor:
        """Read that slice of every dimension (None is all), in the dtype of the file, in memory of its own."""
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
                result = torch.empty(sizes, dtype=self.dtype)
            if is_here:
                here = tuple(slice(a - side.start, b - side.start) for (a, b), side in zip(common, wanted, strict=True))
                there = tuple(slice(a - start, b - start) for (a, b), start in zip(common, offset, strict=True))
                result[here] = found[there]
        assert result is not None
        return result


def _end(offset: list[int], found: Any) -> list[int]:
    return [start + size for start, size in zip(offset, found.get_shape(), strict=True)]


def covers_once(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return True if every element of a tensor is in exactly one box, and no box is elsewhere.

    The sides of all boxes cut the tensor into cells, each of which must be in one box.

    Args:
        boxes: first index and end, in every dimension.
    """
    if any(len(start) != len(shape) or len(end) != len(shape) for start, end in boxes):
        return False
    cuts = [sorted({0, size, *(side[dim] for box in boxes for side in box)}) for dim, size in enumerate(shape)]
    if any(cut[0] < 0 or cut[-1] > size for cut, size in zip(cuts, shape, strict=True)):
        return False
    numbers = [{side: number for number, side in enumerate(cut)} for cut in cuts]
    taken: Counter[tuple[int, ...]] = Counter()
    for start, end in boxes:
        sides = zip(numbers, start, end, strict=True)
        taken.update(itertools.product(*(range(number[a], number[b]) for number, a, b in sides)))
    return set(taken.values()) <= {1} and len(taken) == math.prod(len(cut) - 1 for cut in cuts)


def parts_of(named: Mapping[str, Tensor | TensorPart]) -> dict[str, TensorPart]:
    """Return the part of each tensor that this rank writes; one rank writes what several hold."""
    own = {
        name: held if isinstance(held, TensorPart) else _own_part(held)
        for name, held in named.items()
        if isinstance(held, TensorPart) or is_first_copy(held) or name.startswith(OF_EACH_RANK)
    }
    return dict(sorted(own.items(), key=lambda item: file_order((item[0], (item[1].tensor.dtype, ())))))


def _own_part(tensor: Tensor) -> TensorPart:
    offset = [side.start for side in own_box(tensor)]
    return TensorPart(local_part(tensor.detach()).contiguous(), offset, tensor.shape)


def write_parts(
    file: Path,
    parts: Mapping[str, TensorPart],
    stamp: Stamp,
    pieces: Callable[[Tensor], Iterable[Tensor]] = host_pieces,
) -> None:
    """Write the parts that ``parts_of`` returned.

    Args:
        pieces: yields the bytes of a tensor; it is called in the order of ``parts``.
    """
    layouts = {name: (part.tensor.dtype, part.tensor.shape) for name, part in parts.items()}
    offsets = msgspec.json.encode({name: _Offsets(part.offset) for name, part in parts.items()}).decode()
    shapes = msgspec.json.encode({name: list(part.shape) for name, part in parts.items()}).decode()
    contents = (pieces(part.tensor) for part in parts.values())
    write_tensors(file, layouts, contents, _METADATA | {_OFFSETS: offsets, _SHAPES: shapes}, stamp)


def open_parts(files: Sequence[Path], stamp: Stamp | None) -> dict[str, SavedTensor]:
    """Return the tensors of several files by name; nothing of their data is read yet.

    Args:
        stamp: what each file must say of itself; None if they have no digests.

    Raises:
        DamageError: a header is not what was written, or the parts of a tensor are not all of it, each once.
        FileNotFoundError: a file is not there.
    """
    found: dict[str, SavedTensor] = {}
    for file in files:
        with damage_of(file):
            _add_parts(file, stamp, found)
    for name, tensor in found.items():
        if not tensor.is_whole():
            among = f"{files[0].name} to {files[-1].name}" if len(files) > 1 else files[0].name
            raise DamageError(files[0].parent, f"the parts of {name} in {among} do not cover it exactly once")
    return found


def _add_parts(file: Path, stamp: Stamp | None, found: dict[str, SavedTensor]) -> None:
    header = TensorFile(file)
    if stamp is not None:
        header.check_origin(stamp)
    reader: Any = safetensors_library().safe_open(file, framework="pt", device="cpu")
    offsets = msgspec.json.decode(header.metadata.get(_OFFSETS, "{}"), type=dict[str, _Offsets])
    shapes = msgspec.json.decode(header.metadata.get(_SHAPES, "{}"), type=dict[str, list[int]])
    for name, part in offsets.items():
        found.setdefault(name, SavedTensor()).add_part(part.saved_offsets, shapes.get(name), reader.get_slice(name))
