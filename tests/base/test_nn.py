"""The module contract: where each weight is."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from rlcore.errors import CheckpointError, InvalidInputError, MissingDependencyError
from rlcore.nn import TrainModule, errors_named, optimizers_of, safetensors_library, schedulers_of
from rlcore.weights.view import Adapters, WeightView


class Experts(TrainModule):
    """Three experts in one parameter, which checkpoints hold singly, the second matrix turned."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(2, 3)
        self.fused = nn.Parameter(torch.arange(3 * 4 * 2.0).view(3, 4, 2))

    def weight_views(self, adapters: Adapters = "merged") -> Iterator[WeightView]:
        for weight in super().weight_views(adapters):
            if weight.name != "fused":
                yield weight
                continue
            for index, expert in enumerate(weight.view):
                up, down = expert.chunk(2)
                yield WeightView(f"experts.{index}.up", weight.parameter, up)
                yield WeightView(f"experts.{index}.down", weight.parameter, down.T)
        yield WeightView("total", None, torch.empty(1, device="meta"), lambda: self.fused.detach().sum()[None])


def test_a_plain_module_has_its_parameters_by_their_own_names() -> None:
    module = TrainModule()
    module.a, module.b = nn.Linear(3, 2), nn.Linear(3, 2, bias=False)
    module.b.weight = module.a.weight
    views = {weight.name: weight for weight in module.weight_views()}
    assert list(views) == ["a.weight", "a.bias"], "tied ones once"
    assert views["a.weight"].parameter is module.a.weight
    assert views["a.weight"].view.is_meta and views["a.weight"].view.shape == (2, 3)
    assert all(found.data_ptr() == module.get_parameter(name).data_ptr() for name, found in module.named_weights())


def test_weights_that_are_parts_of_a_parameter_are_views_of_it_and_others_are_computed() -> None:
    module = Experts()
    weights: dict[str, Tensor] = dict(module.named_weights())
    assert torch.equal(weights["experts.1.up"], module.fused[1, :2])
    assert torch.equal(weights["experts.2.down"], module.fused[2, 2:].T)
    assert weights["total"].item() == sum(range(24))
    weights["experts.2.down"][0, 1] = -1.0
    assert module.fused[2, 3, 0] == -1.0, "a view, not a copy"
    shapes = {weight.name: weight.view.shape for weight in module.weight_views()}
    assert all(weights[name].shape == shape for name, shape in shapes.items())


def test_optimizers_and_schedulers_are_the_modules_attributes_of_these_kinds() -> None:
    module = TrainModule()
    module.layer = nn.Linear(3, 2)
    module.slow, module.fast = (torch.optim.SGD(module.layer.parameters(), lr=lr) for lr in (0.1, 0.2))
    module.warmup = torch.optim.lr_scheduler.LinearLR(module.fast)
    module.alias, module.some = module.slow, [module.slow]
    assert optimizers_of(module) == {"slow": module.slow, "fast": module.fast}
    assert schedulers_of(module) == {"warmup": module.warmup}


def test_optimizers_and_schedulers_in_lists_tuples_and_dicts_are_found_once_each() -> None:
    module, parameter = TrainModule(), nn.Parameter(torch.zeros(1))
    first, second, third, fourth = (torch.optim.SGD([parameter], lr=0.1) for _ in range(4))
    module.last = module.parts = {"a/b": first, "c": second, "deeper": [fourth]}
    module.parts["itself"] = module.parts
    module.pairs = [second, torch.optim.lr_scheduler.LinearLR(second), {parameter: fourth}]
    module.by_parameter = {parameter: third}
    module.data = [fourth] * 1001
    assert optimizers_of(module) == {"last.a/b": first, "last.c": second, "by_parameter.0": third}
    assert schedulers_of(module) == {"pairs.1": module.pairs[1]}


def test_an_error_of_another_library_names_the_folder_and_our_own_stays() -> None:
    text = r"^cannot read the model at a/b: KeyError: 'dtype'; see to its config.json"
    with pytest.raises(CheckpointError, match=text) as raised, errors_named("a/b"):
        {}["dtype"]
    assert isinstance(raised.value.__cause__, KeyError)
    with pytest.raises(InvalidInputError, match=r"^ours$"), errors_named("a/b"):
        raise InvalidInputError("ours")


def test_without_safetensors_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(MissingDependencyError, match=r"reading model weights needs .*pip install 'rlcore\[hf\]'"):
        safetensors_library()
