"""vLLM's layerwise reload of a layer that gets some of its elements: the others keep their values."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlcore.engines.sampling.vllm import versions

LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"


class Padded(nn.Module):
    """``weight`` [6, 4], of which a checkpoint has the first four rows, and ``scale`` [4], which it may not have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6, 4), 7.0), requires_grad=False)
        self.scale = nn.Parameter(torch.full((4,), 3.0), requires_grad=False)
        for parameter in self.parameters():
            parameter.weight_loader = _load  # type: ignore[attr-defined]

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        for name, weight in weights.items():
            parameter: Any = getattr(self, name)
            parameter.weight_loader(parameter, weight)


def _load(param: Tensor, weight: Tensor) -> None:
    param.data[: weight.shape[0]].copy_(weight)


class Layerwise(ModuleType):
    """The part of vLLM's module of that name for layers with parameters alone; uninitialized memory is NaN here."""

    def __init__(self) -> None:
        super().__init__(LAYERWISE)
        self._infos: dict[nn.Module, Any] = {}

    def get_layerwise_info(self, layer: nn.Module) -> Any:
        return self._infos.setdefault(layer, SimpleNamespace(kernel_tensors=None, loaded_weights=[]))

    def record_metadata_for_reloading(self, model: nn.Module) -> None:
        """The parameters are as they were made."""

    def initialize_layerwise_reload(self, model: nn.Module) -> None:
        for layer in model.modules():
            info = self.get_layerwise_info(layer)
            info.kernel_tensors = dict(layer.named_parameters(recurse=False)), {}
            for name, parameter in info.kernel_tensors[0].items():
                meta: Any = nn.Parameter(parameter.to("meta"), requires_grad=False)
                meta.weight_loader = lambda _, weight, name=name, info=info: info.loaded_weights.append((name, weight))
                setattr(layer, name, meta)

    def finalize_layerwise_reload(self, model: nn.Module, model_config: object) -> None:
        for layer in model.modules():
            info = self.get_layerwise_info(layer)
            for name, kept in info.kernel_tensors[0].items():
                now = getattr(layer, name)
                made = torch.full_like(now, torch.nan, device="cpu") if now.is_meta else now
                for weight in (weight for loaded, weight in info.loaded_weights if loaded == name):
                    kept.weight_loader(made, weight)
                if info.loaded_weights:
                    kept.data.copy_(made)
                setattr(layer, name, kept)
            info.kernel_tensors, info.loaded_weights = None, []


@pytest.fixture(params=["a twin", pytest.param("vLLM", marks=pytest.mark.vllm)])
def layerwise(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "vLLM":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about vLLM's code
            from vllm.model_executor.model_loader.reload import layerwise

        return layerwise
    parts = LAYERWISE.split(".")
    for end in range(1, len(parts)):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    twin = Layerwise()
    monkeypatch.setitem(sys.modules, LAYERWISE, twin)
    return twin


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that is not written holds NaN in vLLM's own code too."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("given", [("weight",), ("weight", "scale")])
def test_what_no_weight_fills_keeps_its_values(layerwise: Any, given: tuple[str, ...]) -> None:
    model = Padded()
    parameters = dict(model.named_parameters())
    layerwise.record_metadata_for_reloading(model)
    weights = {"weight": torch.ones(4, 4), "scale": torch.ones(4)}
    config: Any = SimpleNamespace(model_config=None)
    with poisoned_memory(), versions.reloading(model, config):
        model.load_weights({name: weights[name] for name in given})
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters()), "kernels have addresses"
    assert model.weight.tolist() == [[1.0] * 4] * 4 + [[7.0] * 4] * 2
    assert model.scale.tolist() == [1.0 if "scale" in given else 3.0] * 4


class Experts(nn.Module):
    """A layer whose kernel reads its scale; a load makes both anew and the layer's own tensors get the values."""

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight_scale = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.own = self.w13_weight_scale.detach()
        self.derived = torch.zeros(2)
        self.quant_method = SimpleNamespace(moe_quant_config=self.config(self.w13_weight_scale))

    def config(self, scale: Tensor) -> SimpleNamespace:
        return SimpleNamespace(_w1=SimpleNamespace(dtype=None, scale=scale, alpha=self.derived), _w2=SimpleNamespace())

    def load_weights(self) -> None:
        self.own.fill_(7)
        self.derived = self.derived + 1
        self.quant_method.moe_quant_config = self.config(nn.Parameter(torch.full((2,), 7.0), requires_grad=False))


def test_a_kernel_of_experts_reads_the_layers_own_scales_after_a_reload(layerwise: Any) -> None:
    model = Experts()
    layerwise.record_metadata_for_reloading(model)
    config: Any = SimpleNamespace(model_config=None)
    for step in (1, 2):
        with versions.reloading(model, config):
            model.load_weights()
        read = model.quant_method.moe_quant_config._w1
        assert read.scale is model.w13_weight_scale and read.scale.data_ptr() == model.own.data_ptr()
        assert read.alpha.tolist() == [step] * 2, "what is derived from weights is what the last load made"


def test_what_gets_nothing_stays_as_it_is(layerwise: Any) -> None:
    model = Padded()
    layerwise.record_metadata_for_reloading(model)
    config: Any = SimpleNamespace(model_config=None)
    with poisoned_memory(), versions.reloading(model, config):
        pass
    assert bool((model.weight == 7).all()) and bool((model.scale == 3).all())
