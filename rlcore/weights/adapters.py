"""Adapters that peft added to a module in place, by ``module.add_adapter`` or ``peft.inject_adapter_in_model``.

A layer with an adapter holds the replaced layer as ``base_layer``. The weights of that layer keep their names here.
peft's own code merges and initializes, on a copy of one layer at a time: the live weights are never written.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlcore.errors import UnsupportedError
from rlcore.weights.view import GATHER, whole

_INITIAL = (True, False, "gaussian")
"""Values of ``init_lora_weights`` that need no base weights: those are on meta when peft initializes adapters."""


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """Return path -> layer for the layers with adapters, outermost first."""
    peft = sys.modules.get("peft.tuners.tuners_utils")  # if it is not imported, nobody has used it
    if peft is None:
        return {}
    return {path: part for path, part in module.named_modules() if isinstance(part, peft.BaseTunerLayer)}


def check_adapters(module: nn.Module) -> None:
    """Raise UnsupportedError for adapters that cannot be trained, sharded and merged here."""
    layers = adapted_layers(module)
    if not layers:
        return
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for path, part in module.named_modules():
        if isinstance(part, AuxiliaryTrainingWrapper):
            raise UnsupportedError(
                f"peft's {type(part).__name__} at {path}",
                "it holds a second copy of the layer; train the layer itself: leave out modules_to_save and call "
                "requires_grad_(True) on its parameters",
            )
    for path, layer in layers.items():
        if not isinstance(layer, LoraLayer):
            raise UnsupportedError(f"peft's {type(layer).__name__} at {path}", "the adapters supported are LoRA's")
        if any(layer.use_dora.values()):
            raise UnsupportedError(f"DoRA at {path}", "it starts from the base weights, which are read later")
    _check_tied(module, layers)
    for adapter, config in module.peft_config.items():  # type: ignore[union-attr, operator]
        if config.init_lora_weights not in _INITIAL:
            raise UnsupportedError(
                f"init_lora_weights={config.init_lora_weights!r} of adapter {adapter!r}",
                f"it starts from the base weights, which are read later; use one of {_INITIAL}",
            )


def _check_tied(module: nn.Module, layers: Mapping[str, Any]) -> None:
    """Refuse adapters on tied weights, because a merge would change the other layer too."""
    held_at: dict[Tensor, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        path = next((path for path in layers if name.startswith(f"{path}.")), "")
        if held_at.setdefault(parameter, path) != path:
            raise UnsupportedError(f"an adapter on {path or held_at[parameter]}", f"its weight is tied, also as {name}")


def base_name(layers: Mapping[str, Any], name: str) -> str | None:
    """Return a parameter's name in the module without adapters; None for a parameter of an adapter."""
    kept: list[str] = []
    path = ""
    for part in name.split("."):
        if path not in layers:
            kept.append(part)
        elif part != "base_layer":
            return None
        path = f"{path}.{part}" if path else part
    return ".".join(kept)


def adapter_names(module: nn.Module) -> dict[str, str]:
    """Return name in the module -> name in peft's files without prefix, for the parameters of active adapters."""
    layers = adapted_layers(module)
    found = {}
    for name, _ in module.named_parameters() if layers else ():
        if base_name(layers, name) is None:
            kept = [part for part in name.split(".") if part not in layers[_innermost(layers, name)].active_adapters]
            found[name] = ".".join(kept)
    return found


class Merged:
    """Base weights with the active adapters added. One layer is kept, because views of a parameter come in a row."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self._layers = layers
        self._path = ""
        self._given: set[str] = set()
        self._weights: dict[str, Tensor] = {}

    def changes(self, name: str) -> bool:
        """Return True if the parameter ``name`` of the module belongs to a layer with adapters."""
        return any(name.startswith(f"{path}.") for path in self._layers)

    def weight(self, name: str, asker: str) -> Tensor:
        """Return a whole merged weight; all ranks call this. A second request of the same asker merges again."""
        path = next(path for path in self._layers if name.startswith(f"{path}."))  # the outermost
        if path != self._path or asker in self._given:
            self.release()  # before the next copy is made
            self._weights, self._path = _merged(self._layers[path]), path
        self._given.add(asker)
        return self._weights[name.removeprefix(f"{path}.").replace("base_layer.", "")]

    def release(self) -> None:
        """Forget the merged layer. Only the caller knows when parameters may have changed: a write to ``.data`` leaves
        no trace."""
        self._weights, self._path, self._given = {}, "", set()


@torch.no_grad()
def _merged(layer: Any) -> dict[str, Tensor]:
    values = {id(parameter): _whole_copy(parameter) for parameter in layer.parameters()}
    copied = copy.deepcopy(layer, values)
    for part in adapted_layers(copied).values():  # the layer itself, and those inside it
        if not part.merged:
            part.merge()
    return {name: parameter.detach() for name, parameter in copied.get_base_layer().named_parameters()}


def _whole_copy(parameter: Tensor) -> nn.Parameter:
    value = whole(parameter)
    is_gathered = isinstance(parameter, DTensor) or hasattr(parameter, GATHER)
    return nn.Parameter(value if is_gathered else value.clone(), requires_grad=False)


def fresh_adapter(module: nn.Module, name: str) -> Tensor:
    """Return the initial value that peft gives the adapter's parameter ``name``, with the host's random numbers."""
    layers = adapted_layers(module)
    path = _innermost(layers, name)
    layer = layers[path]
    values: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.randn(parameter.shape)) for parameter in layer.parameters()
    }
    copied = copy.deepcopy(layer, values | {id(layer.base_layer): layer.base_layer})
    for child in (child for key, child in copied.named_children() if key != "base_layer"):
        for part in child.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()  # init_lora_weights=False keeps these values
    for adapter, config in module.peft_config.items():  # type: ignore[union-attr, operator]
        copied.reset_lora_parameters(adapter, config.init_lora_weights)
    fresh: Tensor = copied.get_parameter(name.removeprefix(f"{path}.")).detach()
    return fresh


def _innermost(layers: Mapping[str, Any], name: str) -> str:
    return max((path for path in layers if name.startswith(f"{path}.")), key=len)
