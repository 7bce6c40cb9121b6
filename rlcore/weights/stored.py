"""The names of a transformers model's tensors in checkpoints, and their layout as views of the model's own tensors.

Transformers renames, splits and joins tensors when it loads, and ``save_pretrained`` reverts that. The reversal runs
here on meta tensors under a dispatch mode. An output in the storage of an input is a view of it; an output that joins
such views is recorded part by part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from rlcore._torch_private import RESHAPE, schema_of
from rlcore.weights.dispatch_tracer import DispatchTracer, Handler, storage_key, tensors_in
from rlcore.weights.view import Box, divided, whole_box

_aten = torch.ops.aten


class StoredPart(NamedTuple):
    """A part of a checkpoint tensor that is a view of one of the model's own tensors."""

    box: Box
    """The place of the part in the checkpoint tensor."""
    source: str
    view: Tensor
    """On meta: a view of a contiguous tensor of the shape of ``source``. It has the box's shape, or that shape with
    some dimensions divided."""


class StoredTensor(NamedTuple):
    """A checkpoint tensor."""

    name: str
    sources: tuple[str, ...]
    """Names of the model's own tensors from which it is computed."""
    meta: Tensor
    """Its shape and dtype."""
    parts: tuple[StoredPart, ...]
    """The parts that make all of it; empty if it is neither a view nor joined from views."""


class Conversion:
    """Conversion of a transformers model's own tensors to those of its checkpoint.

    Args:
        model: a model that transformers has loaded.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._stored: tuple[Any, list[StoredTensor]] = None, []

    @classmethod
    def of_checkpoint(cls, model_class: Any, config: Any, names: Collection[str] = ()) -> Self:
        """Return the conversion of a model for a checkpoint with these tensor names; without names, of a new model."""
        with torch.device("meta"):
            model = model_class._from_config(config)
        if names:
            model._weight_conversions = _used(model, names)
        return cls(model)

    def revert(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the checkpoint tensors computed from the model's own."""
        from transformers.core_model_loading import revert_weight_conversion

        reverted: dict[str, Tensor] = revert_weight_conversion(self._model, dict(own))
        return reverted

    def stored(self, own: Mapping[str, Tensor]) -> list[StoredTensor]:
        """Return every checkpoint tensor, given the model's own tensors on meta."""
        key = {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}
        if self._stored[0] != key:
            with _ReversionTracer(own) as tracer:
                reverted = self.revert(own)
            self._stored = key, [tracer.stored(name, tensor) for name, tensor in reverted.items()]
        return self._stored[1]


def _used(model: Any, names: Collection[str]) -> list[Any]:
    """Return the conversions that loading tensors of these names would use: only they must be reverted."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    if not hasattr(WeightRenaming, "was_used"):  # before transformers 5.7
        used = {id(conversion) for name in names for conversion in _matching(name, renamings, converters)}
        return [conversion for conversion in conversions if id(conversion) in used]
    own = model.state_dict()
    for name in sorted(names, key=dot_natural_key):
        rename_source_key(name, renamings, converters, model.base_model_prefix, own)
    return [conversion for conversion in conversions if conversion.was_used()]


def _matching(name: str, renamings: Sequence[Any], converters: Sequence[Any]) -> Iterator[Any]:
    """Yield the conversions that rename a tensor: all renamings that match, in turn, and the first such converter."""
    renamed = name
    for renaming in renamings:
        renamed, pattern = renaming.rename_source_key(renamed)
        if pattern is not None:
            yield renaming
    for converter in converters:
        renamed, pattern = converter.rename_source_key(renamed)
        if pattern is not None:
            yield converter
            return


class _ReversionTracer(DispatchTracer):  # type: ignore[no-untyped-call]
    """Records the origin of each tensor, and skips copies whose only aim is contiguous memory."""

    def __init__(self, own: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._sources: dict[int, tuple[str, ...]] = {storage_key(tensor): (name,) for name, tensor in own.items()}
        self._views = set(self._sources)
        self._joined: dict[int, tuple[torch.Size, tuple[StoredPart, ...]]] = {}
        self._held: list[Tensor] = []  # kept alive, so that no storage reuses the address of another

    def handler(self, func: Any) -> Handler:
        known = {
            _aten.clone.default: self._clone,
            RESHAPE: self._reshape,
            _aten.cat.default: self._cat,
        }
        return known.get(func, self._run)

    def _clone(self, func: Any, args: Any, kwargs: Any) -> Any:
        return _aten.alias.default(args[0])

    def _reshape(self, func: Any, args: Any, kwargs: Any) -> Any:
        if args[0].is_contiguous():
            return self._run(func, args, kwargs)
        made = torch.empty(args[1], dtype=args[0].dtype, device="meta")  # it has to copy
        self._joined[storage_key(made)] = made.shape, self._merged(args[0], made)
        return self._remember(func, args, kwargs, made)

    def _cat(self, func: Any, args: Any, kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        self._joined[storage_key(made)] = made.shape, self._parts_side_by_side(*args)
        return self._remember(func, args, kwargs, made)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._remember(func, args, kwargs, func(*args, **kwargs))

    def _remember(self, func: Any, args: Any, kwargs: Any, made: Any) -> Any:
        given = map(storage_key, tensors_in((args, kwargs)))
        sources = tuple(dict.fromkeys(name for storage in given for name in self._sources.get(storage, ())))
        for result in tensors_in(made):
            self._held.append(result)
            key = storage_key(result)
            if key not in self._views or schema_of(func).is_mutable:
                self._views.discard(key)
                self._sources[key] = sources
            if schema_of(func).is_mutable:
                self._joined.pop(key, None)
        return made

    def _parts_side_by_side(self, tensors: Sequence[Tensor], dim: int = 0) -> tuple[StoredPart, ...]:
        """Return the parts of the concatenation of ``tensors``; none if one of them has no parts."""
        found: list[StoredPart] = []
        start, dim = 0, dim % tensors[0].dim()
        for tensor in tensors:
            parts = self._parts(tensor)
            if not parts:
                return ()
            found += [part._replace(box=_moved(part.box, dim, start)) for part in parts]
            start += tensor.shape[dim]
        return tuple(found)

    def _merged(self, tensor: Tensor, to: Tensor) -> tuple[StoredPart, ...]:
        """Return the part of a reshape that only merges dimensions of a view; none for any other reshape."""
        is_merge = storage_key(tensor) in self._views and divided(tensor.shape, to.shape) is not None
        return tuple(part._replace(box=whole_box(to)) for part in self._parts(tensor)) if is_merge else ()

    def _parts(self, tensor: Tensor) -> tuple[StoredPart, ...]:
        storage = storage_key(tensor)
        if storage in self._views:
            return (StoredPart(whole_box(tensor), self._sources[storage][0], tensor),)
        shape, parts = self._joined.get(storage, (None, ()))
        # other views of a joined tensor have no recorded parts
        return parts if tensor.shape == shape and tensor.is_contiguous() else ()

    def stored(self, name: str, tensor: Tensor) -> StoredTensor:
        return StoredTensor(name, self._sources[storage_key(tensor)], tensor, self._parts(tensor))


def _moved(box: Box, dim: int, by: int) -> Box:
    return (*box[:dim], slice(box[dim].start + by, box[dim].stop + by), *box[dim + 1 :])
