"""A check that an engine's reload of weights gives the result of its first load. Else a sync would be wrong unseen.

The self-test of a sync's plan compares with a reload. vLLM's build for the CPU packs the weights of experts when it
loads them first, and leaves them unpacked when it loads them again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rlcore.engines.weight_sync.target import Target
from rlcore.tensor_data import flat_bytes
from rlcore.weights.source import WeightSource


@torch.no_grad()
def differing_after_reload(target: Target, checkpoint: WeightSource) -> list[str]:
    """Return the names of live tensors that a reload of the same weights changes; afterwards all are as before.

    A model repeats its layers, so only the first weight of each kind is loaded.

    Args:
        target: the model with the weights of its first load.
        checkpoint: the weights that it was loaded from.
    """
    names = first_of_each_kind(checkpoint)
    layers = {_first_number(name) for name in names}
    before = {name: tensor.clone() for name, tensor in target.tensors().items() if _first_number(name) in layers}
    with target.reloading():
        target.reload((name, checkpoint[name].read(()).to(target.device.torch_device)) for name in names)
    live: Mapping[str, Tensor] = target.tensors()
    found = [name for name, was in before.items() if not _is_same(live[name], was)]
    for name, was in before.items():
        live[name].copy_(was)
    return found


def first_of_each_kind(names: Iterable[str]) -> list[str]:
    """Return, of names that differ only in numbers, those with the smallest first number: all experts of a layer."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    chosen = []
    for same in kinds.values():
        first = min(map(_first_number, same))
        chosen += [name for name in same if _first_number(name) == first]
    return chosen


def _first_number(name: str) -> int:
    """Return the first number in a name, -1 if it has none."""
    found = re.search(r"\d+", name)
    return int(found[0]) if found else -1


def _is_same(tensor: Tensor, was: Tensor) -> bool:
    """Compare bytes, as a NaN is not equal to itself."""
    return torch.equal(flat_bytes(tensor), flat_bytes(was))
