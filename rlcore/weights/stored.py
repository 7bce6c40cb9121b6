"""By which names, and as which views of its tensors, a transformers model stands in checkpoints.

Transformers renames, splits and joins tensors as it loads, and ``save_pretrained`` reverts that. Its reversal is run
here on meta tensors: what comes out in the storage of one that went in is a view of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    sources: tuple[str, ...]
    """The model's own tensors that it is made of."""
    meta: Tensor
    """Its shape and dtype."""
    is_view: bool
    """Whether ``meta`` is a view of a contiguous tensor of the shape of its one source."""


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
            with _Provenance(own) as provenance:
                reverted = self.revert(own)
            self._stored = key, [provenance.trace(name, tensor) for name, tensor in reverted.items()]
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


class _Provenance(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves out copies, which are there to make tensors contiguous, and remembers what each tensor comes from."""

    def __init__(self, own: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources: dict[int, tuple[str, ...]] = {_storage(tensor): (name,) for name, tensor in own.items()}
        self._views = set(self._sources)
        self._held: list[Tensor] = []  # so that no storage takes the place of another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten.clone.default:
            return _aten.alias.default(args[0])
        if func is _aten._unsafe_view.default and not args[0].is_contiguous():  # a reshape that has to copy
            made: Any = torch.empty(args[1], dtype=args[0].dtype, device="meta")
        else:
            made = func(*args, **(kwargs or {}))
        given = [_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        sources = tuple(dict.fromkeys(name for storage in given for name in self._sources.get(storage, ())))
        for result in (leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)):
            self._held.append(result)
            if _storage(result) not in self._views or func._schema.is_mutable:
                self._views.discard(_storage(result))
                self._sources[_storage(result)] = sources
        return made

    def trace(self, name: str, tensor: Tensor) -> StoredTensor:
        storage = _storage(tensor)
        return StoredTensor(name, self._sources[storage], tensor, storage in self._views)


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
