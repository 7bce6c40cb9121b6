"""Write a Hugging Face model folder, whole or not at all, in shards that are written as their weights are gathered."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
from torch import Tensor

from rlcore.atomic import resolved, write_file
from rlcore.engines.checkpoints.export_record import check_free, write_record
from rlcore.engines.checkpoints.folder_swap import new_folder, put_in_place, remove_unfinished
from rlcore.engines.checkpoints.tensor_file import Layout, Stamp, host_pieces, write_tensors
from rlcore.errors import CheckpointError, InvalidInputError
from rlcore.nn import TrainModule
from rlcore.weights.view import WeightView, named_tensors, whole

_INDEX = "model.safetensors.index.json"


def export(
    module: TrainModule,
    folder: Path,
    *,
    max_shard_bytes: int,
    writes: bool,
    algorithm: str = "xxh3_128",
    views: Callable[[], Iterable[WeightView]] | None = None,
) -> None:
    """Export a module. All workers call it together; the one that ``writes`` holds one weight at a time in host memory.

    Args:
        algorithm: of the digests.
        views: gives the weights with the parameters as they are sharded; None is ``module.weight_views``.

    Raises:
        InvalidInputError: ``max_shard_bytes`` is no positive whole number.
        CheckpointError: the folder holds files that no export wrote or that the module is read from, or could not be
            written.
    """
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise InvalidInputError(f"max_shard_bytes must be a whole number of at least 1, got {max_shard_bytes!r}")
    described = module.weight_views() if views is None else views()
    layouts: dict[str, Layout] = {one.name: (one.view.dtype, one.view.shape) for one in described}
    weights = _gathered(module.named_weights if views is None else lambda: named_tensors(views()), layouts)
    try:
        if writes:
            _export(module, folder, _shards(layouts, max_shard_bytes), weights, Stamp(uuid.uuid4().hex[:12], algorithm))
    finally:
        for _ in weights:  # the other workers gather all of them, also when this one could not write
            pass


def _export(
    module: TrainModule,
    folder: Path,
    shards: list[dict[str, Layout]],
    weights: Iterator[tuple[str, Tensor]],
    stamp: Stamp,
) -> None:
    try:
        target = resolved(folder)  # a link stays, and what it points to is replaced
        _check_is_not_source(target, module)
        remove_unfinished(target)
        check_free(target)
        with new_folder(target) as new:
            _write(module, new, shards, weights, stamp)
            check_free(target)  # again: it took a while
            put_in_place(new, target)
    except OSError as error:
        raise CheckpointError(f"cannot write the model to {folder}: {error}") from error


def _check_is_not_source(folder: Path, module: TrainModule) -> None:
    """Raise CheckpointError if the module's weights are read from there: a restart reads them again."""
    source = module.materialization_source()
    if isinstance(source, Path) and folder in (source.resolve(), *source.resolve().parents):
        raise CheckpointError(f"{folder} holds the files that this module is read from; export to another folder")


def _gathered(
    named_weights: Callable[[], Iterable[tuple[str, Tensor]]], layouts: Mapping[str, Layout]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole weights one at a time, those with wider elements first, which is the order of a file."""
    for itemsize in sorted({dtype.itemsize for dtype, _ in layouts.values()}, reverse=True):
        for name, tensor in named_weights():
            if layouts[name][0].itemsize == itemsize:
                yield name, whole(tensor)


def _shards(layouts: Mapping[str, Layout], max_bytes: int) -> list[dict[str, Layout]]:
    """Return what each file holds, in the order of ``_gathered``."""
    shards: list[dict[str, Layout]] = [{}]
    size = 0
    for name, layout in sorted(layouts.items(), key=lambda item: -item[1][0].itemsize):
        nbytes = _nbytes(layout)
        if size and size + nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = layout
        size += nbytes
    return shards


def _nbytes(layout: Layout) -> int:
    dtype, shape = layout
    return dtype.itemsize * math.prod(shape)


def _write(
    module: TrainModule,
    folder: Path,
    shards: list[dict[str, Layout]],
    weights: Iterator[tuple[str, Tensor]],
    stamp: Stamp,
) -> None:
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = ["model.safetensors"]
    for file, layouts in zip(files, shards, strict=True):
        write_tensors(folder / file, layouts, _contents(layouts, weights), {"format": "pt"}, stamp)
    if len(shards) > 1:
        write_file(folder / _INDEX, _index(dict(zip(files, shards, strict=True))))
    module.export_config(folder)
    write_record(folder, files, stamp)


def _contents(layouts: Mapping[str, Layout], weights: Iterator[tuple[str, Tensor]]) -> Iterator[Iterator[Tensor]]:
    for expected in layouts:
        name, tensor = next(weights)
        assert name == expected, f"named_weights() gave {name} where weight_views() has {expected}"
        yield host_pieces(tensor)


def _index(shards: Mapping[str, Mapping[str, Layout]]) -> bytes:
    """Return the index as transformers writes it."""
    layouts = [layout for held in shards.values() for layout in held.values()]
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(shape) for _, shape in layouts),
            "total_size": sum(map(_nbytes, layouts)),
        },
        "weight_map": {name: file for file, held in sorted(shards.items()) for name in held},
    }
    return msgspec.json.format(msgspec.json.encode(index, order="sorted")) + b"\n"
