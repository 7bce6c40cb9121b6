"""The list of all weights of a module, as views of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from rlcore._torch_private import persistent_buffers
from rlcore.weights.adapters import Merged, adapted_layers, adapter_names, base_name
from rlcore.weights.stored import Conversion, StoredPart, StoredTensor
from rlcore.weights.view import Adapters, WeightPart, WeightView, seen_in, whole, whole_box


def weights_of(module: nn.Module, adapters: Adapters, conversion: Conversion | None = None) -> Iterator[WeightView]:
    """Yield the weights of a module: parameters, tied ones once, and persistent buffers.

    Args:
        conversion: from the module's names to those of checkpoints; None where they are the same.
    """
    if adapters == "only":
        for name, short in adapter_names(module).items():
            parameter = module.get_parameter(name)
            yield WeightView(short, parameter, _on_meta(parameter))
        return
    layers = adapted_layers(module)
    merged = Merged(layers if adapters == "merged" else {})
    own_names: dict[str, str] = {}  # name without adapters -> name in the module
    tensors: dict[str, Tensor] = {}
    for name, tensor in named_tensors(module):
        if (base := base_name(layers, name)) is not None:
            own_names[base], tensors[base] = name, tensor
    first = {id(tensor): base for base, tensor in reversed(tensors.items())}

    def value(base: str, asker: str) -> Tensor:
        name = own_names[base]
        return merged.weight(name, asker) if merged.changes(name) else whole(tensors[base])

    def seen(name: str, base: str, view: Tensor) -> Tensor:
        return seen_in(value(base, name), view)

    def reverted(name: str, sources: tuple[str, ...]) -> Tensor:
        assert conversion is not None
        return conversion.revert({base: value(base, name + base) for base in sources})[name]

    for name, sources, meta, parts in _stored(tensors, conversion):
        if len(parts) != 1 or parts[0].view.shape != meta.shape:
            is_merged = any(merged.changes(own_names[source]) for source in sources)
            joined = () if is_merged else tuple(WeightPart(box, tensors[own], view) for box, own, view in parts)
            yield WeightView(name, None, _on_meta(meta), partial(reverted, name, sources), merged.release, joined)
            continue
        _, base, view = parts[0]
        if first[id(tensors[base])] != base:
            continue
        if merged.changes(own_names[base]):
            yield WeightView(name, None, _on_meta(meta), partial(seen, name, base, view), merged.release)
        else:
            yield WeightView(name, tensors[base], view)


def model_weights(module: nn.Module) -> Callable[[], Iterator[WeightView]]:
    """Return what yields the weights of a module of any kind, by their names in checkpoints.

    Of a transformers model they have the names and the layout of the checkpoint that it was loaded from. Adapters that
    peft added, in place or around the model, are merged into the weights that are yielded.
    """
    inside: Callable[[], nn.Module] | None = getattr(module, "get_base_model", None)  # peft's wrapper has it
    model = module if inside is None else inside()
    conversion = Conversion(model) if hasattr(model, "_weight_conversions") else None
    return partial(weights_of, model, "merged", conversion)


def stored_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the checkpoint tensors of an unsharded module, as views of its parameters and persistent buffers.

    The names are those of the checkpoint that transformers loaded; for another module they are its own.
    """
    conversion = Conversion(module) if hasattr(module, "_weight_conversions") else None
    weights = weights_of(module, "base", conversion)
    return {one.name: seen_in(one.parameter.detach(), one.view) for one in weights if one.parameter is not None}


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, tied ones by each name, and persistent buffers, as ``state_dict()`` without its hooks."""
    yield from module.named_parameters(remove_duplicate=False)
    for path, part in module.named_modules():
        for name, buffer in persistent_buffers(part).items():
            yield f"{path}.{name}" if path else name, buffer


def _stored(tensors: dict[str, Tensor], conversion: Conversion | None) -> list[StoredTensor]:
    own = {name: _on_meta(tensor) for name, tensor in tensors.items()}
    if conversion is not None:
        return conversion.stored(own)
    return [StoredTensor(name, (name,), meta, (StoredPart(whole_box(meta), name, meta),)) for name, meta in own.items()]


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
