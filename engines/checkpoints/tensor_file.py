"""Safetensors files that are written piece by piece, with a digest of each tensor; the library reads slices of them.

The library writes only tensors that lie in host memory whole: for a training state or a large model that would be as
much memory as the devices hold. Any reader of safetensors reads the files: all that is added stands in the metadata of
the header.

    rlcore.seal         digest of the header, of the text in which this is all zeros
    rlcore.algorithm    of the digests
    rlcore.save         the save that the file belongs to
    rlcore.file         the file's name
    rlcore.digests      digest of the bytes of each tensor, as JSON
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from torch import Tensor

from rlcore.engines.checkpoints.damage import DamageError, damage_of
from rlcore.engines.checkpoints.digest import ALGORITHMS, blank, is_sealed, new_digest, sealed
from rlcore.nn import safetensors_library
from rlcore.tensor_data import flat_bytes, host_bytes

_PIECE_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
"""So many bytes are hashed, and written while they are in the processor's cache: so the digest costs nearly nothing."""
_ALIGNMENT = 8
"""The alignment in bytes of the first tensor; wider elements come first, so that each tensor is aligned to its own."""
_LONGEST_HEADER = 100_000_000
"""The limit that the library has."""
Layout = tuple[torch.dtype, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Stamp:
    """The identity of a save, which all its files carry."""

    save: str
    """Its id: 12 hexadecimal digits."""
    algorithm: str = "xxh3_128"
    """The algorithm of the digests."""


def file_order(layout: tuple[str, Layout]) -> tuple[int, str]:
    """Return the sort key of a tensor in a file: wider elements first, then by name."""
    name, (dtype, _) = layout
    return -dtype.itemsize, name


def host_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bytes of a tensor as uint8 tensors in host memory, in order."""
    yield from (part.cpu() for part in torch.split(flat_bytes(tensor), _PIECE_BYTES))


# ----------------------------------------------------------------------------------------------------- written


def write_tensors(
    file: Path,
    layouts: Mapping[str, Layout],
    contents: Iterable[Iterable[Tensor]],
    metadata: Mapping[str, str],
    stamp: Stamp,
) -> None:
    """Write a file under another name, and give it its own once it is whole and on disk.

    Args:
        layouts: dtype and shape by name, in ``file_order``.
        contents: for each of them, in this order, its bytes as uint8 tensors in host memory.
    """
    partial = file.with_name(f".{file.name}")
    header = functools.partial(_header, layouts, metadata, file.name, stamp)
    try:
        with partial.open("wb") as stream:
            stream.write(header(dict.fromkeys(layouts, blank(stamp.algorithm))))
            digests = {
                name: _write_tensor(stream, pieces, new_digest(stamp.algorithm))
                for name, pieces in zip(layouts, contents, strict=True)
            }
            stream.seek(0)
            stream.write(header(digests))
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _write_tensor(stream: BinaryIO, pieces: Iterable[Tensor], digest: Any) -> str:
    for piece in pieces:
        data = host_bytes(piece)
        for start in range(0, data.nbytes, _CHUNK_BYTES):
            part = data[start : start + _CHUNK_BYTES]
            digest.update(part)
            stream.write(part)
    return str(digest.hexdigest())


def _header(
    layouts: Mapping[str, Layout], metadata: Mapping[str, str], name: str, stamp: Stamp, digests: Mapping[str, str]
) -> bytes:
    """Return the header. Its length does not depend on the digests."""
    own = {
        "rlcore.seal": blank(stamp.algorithm),  # first: none of the others can be taken for it
        "rlcore.algorithm": stamp.algorithm,
        "rlcore.save": stamp.save,
        "rlcore.file": name,
        "rlcore.digests": msgspec.json.encode(digests).decode(),
    }
    header: dict[str, object] = {"__metadata__": own | dict(metadata)}
    at = 0
    for tensor, (dtype, shape) in layouts.items():
        end = at + dtype.itemsize * math.prod(shape)
        header[tensor] = {"dtype": _code(dtype), "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    return sealed(len(text).to_bytes(8, "little") + text, stamp.algorithm)


@functools.cache
def _code(dtype: torch.dtype) -> str:
    """Return the format's name of a dtype."""
    written = safetensors_library().torch.save({"any": torch.empty(0, dtype=dtype)})
    code: str = msgspec.json.decode(written[8:])["any"]["dtype"]
    return code


# -------------------------------------------------------------------------------------------------------- read


class _Entry(msgspec.Struct):
    """The entry of a tensor in the header."""

    shape: list[int]
    data_offsets: tuple[int, int]


class TensorFile:
    """The header of a file; the data stay in it."""

    def __init__(self, path: Path) -> None:
        """Read and check the header.

        Raises:
            DamageError: it is not what was written.
            FileNotFoundError: the file is not there.
        """
        self.path = path
        with damage_of(path):
            text = self._header_text()
            header = msgspec.json.decode(text[8:], type=dict[str, msgspec.Raw])
            self.metadata = msgspec.json.decode(header.pop("__metadata__", b"{}"), type=dict[str, str])
            self.is_sealed = "rlcore.seal" in self.metadata
            """False for files without digests, those of rlcore.checkpoint/3."""
            self._check_seal(text)
            self.entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in header.items()}
            self._digests = msgspec.json.decode(self.metadata.get("rlcore.digests", "{}"), type=dict[str, str])
        self._start = len(text)

    def _header_text(self) -> bytes:
        """Read the header with the eight bytes of its length before it."""
        with self.path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = stream.read(8)
            num_bytes = int.from_bytes(length, "little")
            if len(length) < 8 or num_bytes > min(size - 8, _LONGEST_HEADER):
                raise DamageError(self.path, f"its {size} bytes are too few for its header")
            return length + stream.read(num_bytes)

    def _check_seal(self, text: bytes) -> None:
        if not self.is_sealed:
            return
        algorithm = self.metadata.get("rlcore.algorithm")
        if algorithm not in ALGORITHMS or not is_sealed(text, self.metadata["rlcore.seal"], algorithm):
            raise DamageError(self.path, "its header differs from the digest in it")

    @property
    def num_bytes(self) -> int:
        """The number of bytes of all tensors."""
        return max((entry.data_offsets[1] for entry in self.entries.values()), default=0)

    def check_origin(self, stamp: Stamp) -> None:
        """Raise DamageError unless the save wrote the file, and under this name."""
        if not self.is_sealed:
            raise DamageError(self.path, "it has no digests, and the files of its save have")
        save, name, algorithm = (self.metadata.get(f"rlcore.{key}") for key in ("save", "file", "algorithm"))
        if (save, name, algorithm) != (stamp.save, self.path.name, stamp.algorithm):
            raise DamageError(
                self.path, f"it is {name} of the save {save}, where {self.path.name} of the save {stamp.save} belongs"
            )

    def check_data(self) -> None:
        """Compare every tensor with its digest, and the file's size with its header; read piece by piece.

        Raises:
            DamageError: a tensor differs, or cannot be read.
            FileNotFoundError: the file has gone.
        """
        with damage_of(self.path), self.path.open("rb", buffering=0) as stream:
            size, expected = os.fstat(stream.fileno()).st_size, self._start + self.num_bytes
            if size != expected:
                raise DamageError(self.path, f"it has {size} bytes, and had {expected}")
            for name in self.entries if self.is_sealed else ():
                if self._digest(stream, name) != self._digests.get(name):
                    raise DamageError(self.path, f"the data of {name} differ from their digest")

    def _digest(self, stream: Any, name: str) -> str:
        start, end = self.entries[name].data_offsets
        digest = new_digest(self.metadata["rlcore.algorithm"])
        buffer = memoryview(bytearray(min(end - start, _CHUNK_BYTES)))
        stream.seek(self._start + start)
        missing = end - start
        while missing:
            found = stream.readinto(buffer[:missing])
            if not found:
                break
            digest.update(buffer[:found])
            missing -= found
        return str(digest.hexdigest())
