"""Named tensors that can be read a slice at a time, from safetensors files or from memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from rlcore.errors import CheckpointError
from rlcore.nn import TrainModule, errors_named, safetensors_library

_log = logging.getLogger(__name__)


class TensorSlices:
    """One tensor; ``read`` copies only the requested slice."""

    def __init__(self, found: Any) -> None:
        self._found = found  # a tensor, or a safetensors slice of a memory map: both have the same indexing

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._found.shape if isinstance(self._found, Tensor) else self._found.get_shape())

    def read(self, box: tuple[slice, ...]) -> Tensor:
        """Return a slice in host memory, in the dtype of the source; it may be a view of a memory map."""
        read: Tensor = self._found[box or ...]
        return read.detach()


class WeightSource(Mapping[str, TensorSlices]):
    """The tensors from which a module takes its weights, by its own names."""

    def __init__(self, named: Mapping[str, Any], *, is_whole: bool = False) -> None:
        self._named = named
        self.is_whole = is_whole
        """The tensors were read whole into host memory and converted, instead of a slice at a time."""

    def renamed(self, names: Mapping[str, str]) -> WeightSource:
        """Return a source with only these tensors; ``names`` maps new name -> name here."""
        return WeightSource({new: self._named[name] for new, name in names.items()}, is_whole=self.is_whole)

    def __getitem__(self, name: str) -> TensorSlices:
        return TensorSlices(self._named[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)


def on_meta(source: WeightSource) -> dict[str, Tensor]:
    """Return the tensors of a source without values."""
    return {name: _without_values(found) for name, found in source.items()}


def _without_values(found: TensorSlices) -> Tensor:
    nothing = found.read((slice(0, 0),) if found.shape else ())  # safetensors tells a dtype by its own names
    return torch.empty(found.shape, dtype=nothing.dtype, device="meta")


def open_weights(module: TrainModule, dtype: torch.dtype) -> WeightSource:
    """Return the source of a module that is not sharded yet.

    Raises:
        CheckpointError: there is no file, or a damaged one.
    """
    source = module.materialization_source()
    if isinstance(source, Mapping):
        return WeightSource(source)
    with errors_named(source):
        named = in_files(_files(source))
    if named and (stored := module.stored_names(named.keys())) is not None:
        return named.renamed(stored)
    if not named and type(module).converted_weights is TrainModule.converted_weights:
        raise CheckpointError(f"no safetensors file at {source}")
    _log.warning(
        "%s: the tensors of %s are not this module's name by name; every worker reads them whole and converts them",
        type(module).__name__,
        source,
    )
    return WeightSource(module.converted_weights(dtype), is_whole=True)


def in_files(files: Iterable[Path]) -> WeightSource:
    """Return the tensors of safetensors files."""
    return WeightSource({name: found for file in files for name, found in _slices(file).items()})


def _files(source: Path) -> list[Path]:
    """Return the files that transformers would read: those of the index, else the one file, else all there are."""
    if source.is_file():
        return [source]
    index = source / "model.safetensors.index.json"
    if index.exists():
        names = msgspec.json.decode(index.read_bytes())["weight_map"].values()
        return [source / name for name in sorted(set(names))]
    one = source / "model.safetensors"
    return [one] if one.exists() else sorted(source.glob("*.safetensors"))


def _slices(file: Path) -> dict[str, Any]:
    opened = safetensors_library().safe_open(file, framework="pt", device="cpu")
    return {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
