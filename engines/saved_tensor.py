"""Tensors in safetensors files, each in parts that several workers have written; read by the slice."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from rlcore.engines.sharding import is_first_copy, local_part, own_box

_PARTS = "rlcore.parts"  # in a file's metadata: name -> [offset in the whole tensor, shape of the whole tensor]
OF_EACH_RANK = "rank-"
"""Start of the names of tensors that each rank has for itself."""
_Layout = dict[str, tuple[list[int], list[int]]]


class SavedTensor:
    """One tensor, whole or in parts."""

    def __init__(self, shape: Iterable[int]) -> None:
        self.shape = torch.Size(shape)
        self._parts: list[tuple[list[int], Any]] = []

    def add_part(self, offset: list[int], found: Any) -> None:
        self._parts.append((offset, found))

    def read(self, box: tuple[slice, ...] | None = None) -> Tensor:
        """That slice of every dimension (None is all), in the dtype of the file, in memory of its own."""
        wanted = box or tuple(slice(0, size) for size in self.shape)
        result: Tensor | None = None
        for offset, found in self._parts:
            piece = found[...]
            if result is None:
                result = torch.empty([side.stop - side.start for side in wanted], dtype=piece.dtype)
            ends = [start + size for start, size in zip(offset, piece.shape, strict=True)]
            common = [
                (max(side.start, start), min(side.stop, end))
                for side, start, end in zip(wanted, offset, ends, strict=True)
            ]
            if all(start < stop for start, stop in common):
                here = tuple(slice(a - side.start, b - side.start) for (a, b), side in zip(common, wanted, strict=True))
                there = tuple(slice(a - start, b - start) for (a, b), start in zip(common, offset, strict=True))
                result[here or ...] = piece[there or ...]
        assert result is not None
        return result


def write_parts(file: Path, named: Mapping[str, Tensor]) -> None:
    """What this rank holds of each tensor; nothing of those that another rank holds too and writes."""
    from safetensors.torch import save_file

    parts: dict[str, Tensor] = {}
    layout: _Layout = {}
    for name, tensor in named.items():
        if is_first_copy(tensor) or name.startswith(OF_EACH_RANK):
            parts[name] = local_part(tensor.detach()).cpu().contiguous()
            layout[name] = [side.start for side in own_box(tensor)], list(tensor.shape)
    save_file(parts, file, metadata={_PARTS: msgspec.json.encode(layout).decode()})
    with file.open("rb") as written:
        os.fsync(written.fileno())


def open_parts(files: Iterable[Path]) -> dict[str, SavedTensor]:
    """The tensors of several files by name; nothing of them is read yet."""
    from safetensors import safe_open

    found: dict[str, SavedTensor] = {}
    for file in files:
        opened: Any = safe_open(file, framework="pt", device="cpu")
        layout = msgspec.json.decode((opened.metadata() or {}).get(_PARTS, "{}"), type=_Layout)
        for name, (offset, shape) in layout.items():
            found.setdefault(name, SavedTensor(shape)).add_part(offset, opened.get_slice(name))
    return found
