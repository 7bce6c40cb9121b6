"""Whether vLLM's reload of weights gives what its first load gave. Where it does not, a sync would be wrong unseen.

The proof of a sync's plan takes the reload for the truth. vLLM's build for the CPU packs the weights of experts when it
loads them, and leaves them unpacked when it loads them again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rlcore.engines.weight_sync.target import Target
from rlcore.weights.source import WeightSource


@torch.no_grad()
def differing_after_reload(target: Target, checkpoint: WeightSource) -> list[str]:
    """Names of live tensors that a reload of the same weights changes; they are as they were afterwards.

    A model repeats its layers: of each kind of weight the first is loaded.

    Args:
        target: with the weights of its first load.
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
    """Of names that differ in numbers alone those whose first number is the smallest: a layer's experts all."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    chosen = []
    for same in kinds.values():
        first = min(map(_first_number, same))
        chosen += [name for name in same if _first_number(name) == first]
    return chosen


def _first_number(name: str) -> int:
    """-1 for a name without one."""
    found = re.search(r"\d+", name)
    return int(found[0]) if found else -1


def _is_same(tensor: Tensor, was: Tensor) -> bool:
    """Bytes, as a NaN is not equal to itself."""
    return torch.equal(_bytes(tensor), _bytes(was))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
