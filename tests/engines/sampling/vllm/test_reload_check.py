"""A loader that does not do the same again is seen, and leaves no trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlcore.engines.sampling.replica.reloads import differing_after_reload, first_of_each_kind
from rlcore.engines.weight_sync.target import ModuleTarget
from rlcore.registry import get_device
from rlcore.weights.source import WeightSource


class Reloading(ModuleTarget):
    """Loads experts transposed, as ``again`` says, when it loads them again."""

    def __init__(self, module: nn.Module, again: Any) -> None:
        super().__init__(module, get_device("cpu"))
        self._again = again
        self.loaded: list[str] = []

    def reload(self, weights: Any) -> None:
        for name, tensor in weights:
            self.loaded.append(name)
            self.tensors()[name].copy_(self._again(tensor) if "experts" in name else tensor)

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        yield


def model() -> nn.Module:
    layers = [nn.ModuleDict({"experts": nn.Linear(4, 4, bias=False), "out": nn.Linear(4, 2)}) for _ in range(3)]
    return nn.ModuleDict({"layers": nn.ModuleList(layers), "head": nn.Linear(2, 5)})


@pytest.mark.parametrize(("again", "expected"), [(lambda w: w, []), (Tensor.t, ["layers.0.experts.weight"])])
def test_what_a_reload_changes_is_named_and_taken_back(again: Any, expected: list[str]) -> None:
    module = model()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    target = Reloading(module, again)
    assert differing_after_reload(target, WeightSource(before)) == expected
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert not [name for name in target.loaded if "layers.1" in name or "layers.2" in name]


def test_the_first_of_each_kind_is_a_whole_layer_wherever_it_begins() -> None:
    dense = [f"layers.{layer}.attention.{part}" for layer in range(3) for part in "qkv"]
    experts = [f"layers.{layer}.experts.{expert}.up" for layer in (1, 2) for expert in range(4)]
    chosen = first_of_each_kind([*dense, *experts, "embed"])
    assert sorted(chosen) == sorted([*dense[:3], *experts[:4], "embed"])
