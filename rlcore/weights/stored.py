"""By which names, and as which views of its tensors, a transformers model stands in checkpoints.

Transformers renames, splits and joins tensors as it loads, and ``save_pretrained`` reverts that. Its reversal is run
here on meta tensors: what comes out in the storage of one that went in is a view of it, and what was joined of such
views is known part by part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlcore.weights.view import Box, divided, whole_box

_aten = torch.ops.aten


class StoredPart(NamedTuple):
    """A part of a tensor of a checkpoint: a view of one of the model's own tensors."""

    box: Box
    """In the checkpoint's tensor."""
    source: str
    view: Tensor
    """On meta, of the box's shape, or with some of its dimensions divided: a view of a contiguous tensor of the shape
    of ``source``."""


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    sources: tuple[str, ...]
    """The model's own tensors that it is made of."""
    meta: Tensor
    """Its shape and dtype."""
    parts: tuple[StoredPart, ...]
    """All of it; none if it is no view, and not joined of views."""


class Conversion:
    """From the own tensors of a transformers model to those of its checkpoint.

    Args:
        model: that transformers has loaded.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._stored: tuple[Any, list[StoredTensor]] = None, []

    @classmethod
    def of_checkpoint(cls, model_class: Any, config: Any, names: Collection[str] = ()) -> Self:
        """Of a model that is not loaded by transformers, but from tensors of these names; without, of a new one."""
        with torch.device("meta"):
            model = model_class._from_config(config)
        if names:
            model._weight_conversions = _used(model, names)
        return cls(model)

    def revert(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The checkpoint's tensors made of the model's own."""
        from transformers.core_model_loading import revert_weight_conversion

        reverted: dict[str, Tensor] = revert_weight_conversion(self._model, dict(own))
        return reverted

    def stored(self, own: Mapping[str, Tensor]) -> list[StoredTensor]:
        """Every tensor of the checkpoint, given the model's own on meta."""
        key = {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}
        if self._stored[0] != key:
            with _ReversionTrace(own) as trace:
                reverted = self.revert(own)
            self._stored = key, [trace.stored(name, tensor) for name, tensor in reverted.items()]
        return self._stored[1]


def _used(model: Any, names: Collection[str]) -> list[Any]:
    """The conversions that a load of tensors of these names uses: only they are to be reverted."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    own = model.state_dict()
    for name in sorted(names, key=dot_natural_key):
        rename_source_key(name, renamings, converters, model.base_model_prefix, own)
    return [conversion for conversion in conversions if conversion.was_used()]


class _ReversionTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves out copies, which are there to make tensors contiguous, and remembers what each tensor comes from."""

    def __init__(self, own: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources: dict[int, tuple[str, ...]] = {_storage(tensor): (name,) for name, tensor in own.items()}
        self._views = set(self._sources)
        self._joined: dict[int, tuple[torch.Size, tuple[StoredPart, ...]]] = {}
        self._held: list[Tensor] = []  # so that no storage takes the place of another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten.clone.default:
            return _aten.alias.default(args[0])
        if func is _aten._unsafe_view.default and not args[0].is_contiguous():  # a reshape that has to copy
            made: Any = torch.empty(args[1], dtype=args[0].dtype, device="meta")
            self._joined[_storage(made)] = made.shape, self._merged(args[0], made)
        else:
            made = func(*args, **(kwargs or {}))
        given = [_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        sources = tuple(dict.fromkeys(name for storage in given for name in self._sources.get(storage, ())))
        if func is _aten.cat.default:
            self._joined[_storage(made)] = made.shape, self._parts_side_by_side(*args)
        for result in (leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)):
            self._held.append(result)
            if _storage(result) not in self._views or func._schema.is_mutable:
                self._views.discard(_storage(result))
                self._sources[_storage(result)] = sources
            if func._schema.is_mutable:
                self._joined.pop(_storage(result), None)
        return made

    def _parts_side_by_side(self, tensors: Sequence[Tensor], dim: int = 0) -> tuple[StoredPart, ...]:
        """Of what these are joined to; none if one of them has none."""
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
        """Of a view, some of whose dimensions are merged; none of what else a reshape is."""
        is_merge = _storage(tensor) in self._views and divided(tensor.shape, to.shape) is not None
        return tuple(part._replace(box=whole_box(to)) for part in self._parts(tensor)) if is_merge else ()

    def _parts(self, tensor: Tensor) -> tuple[StoredPart, ...]:
        storage = _storage(tensor)
        if storage in self._views:
            return (StoredPart(whole_box(tensor), self._sources[storage][0], tensor),)
        shape, parts = self._joined.get(storage, (None, ()))
        # nothing is known of other views of what was joined
        return parts if tensor.shape == shape and tensor.is_contiguous() else ()

    def stored(self, name: str, tensor: Tensor) -> StoredTensor:
        return StoredTensor(name, self._sources[_storage(tensor)], tensor, self._parts(tensor))


def _moved(box: Box, dim: int, by: int) -> Box:
    return (*box[:dim], slice(box[dim].start + by, box[dim].stop + by), *box[dim + 1 :])


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
