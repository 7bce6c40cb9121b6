"""Safetensors files written piece by piece; reading them is the library's.

The library writes what lies in host memory whole, which of a training state or a large model would be as much again as
the devices hold.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from rlcore.tensor_data import host_bytes

_PIECE_BYTES = 64 << 20
_ALIGNMENT = 8
"""Of the first tensor in the file; those of wider elements come first, so that each is aligned to its own."""
Layout = tuple[torch.dtype, Sequence[int]]


def file_order(layout: tuple[str, Layout]) -> tuple[int, str]:
    """Key to sort names with."""
    name, (dtype, _) = layout
    return -dtype.itemsize, name


def host_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Its bytes as uint8 tensors in host memory, one behind the other."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    yield from (part.cpu() for part in torch.split(flat, _PIECE_BYTES))


def write_tensors(
    file: Path, layouts: Mapping[str, Layout], pieces: Iterable[Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a file, which has its name once it is whole and on disk.

    Args:
        layouts: dtype and shape by name, in ``file_order``.
        pieces: the bytes of these tensors in this order, as uint8 tensors in host memory cut anywhere.
    """
    partial = file.with_name(f".{file.name}")
    try:
        with partial.open("wb") as opened:
            opened.write(_header(layouts, metadata))
            for piece in pieces:
                opened.write(host_bytes(piece))
            opened.flush()
            os.fsync(opened.fileno())
        partial.rename(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _header(layouts: Mapping[str, Layout], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, shape) in layouts.items():
        end = at + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _code(dtype), "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


@functools.cache
def _code(dtype: torch.dtype) -> str:
    """The format's name of a dtype."""
    from safetensors.torch import save

    written = save({"any": torch.empty(0, dtype=dtype)})
    code: str = msgspec.json.decode(written[8:])["any"]["dtype"]
    return code
