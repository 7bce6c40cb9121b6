"""A resumed program has the weights under adapters, the optimizer states and the dtypes that were saved."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rlcore
from rlcore.engines.checkpoints import manifest
from rlcore.engines.checkpoints.train_state import base_names
from rlcore.engines.executors.base_weights import BaseWeights
from rlcore.errors import CheckpointError
from tests.engines.train_policy import Regression, regression_weights

peft = pytest.importorskip("peft", reason="peft is not installed")


class Adapted(Regression):
    """Has a frozen head that starts fresh, under an adapter on ``mix``."""

    new_parameters = ("score",)

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__(weights)
        self.score = nn.Linear(8, 1)
        self.config = {}
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["mix"], r=1), self)
        self.score.requires_grad_(False)

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1)


def engine_of(module_class: Callable[[dict[str, Tensor]], Any], *, seed: int = 0, **options: Any) -> rlcore.TrainEngine:
    with torch.random.fork_rng(), rlcore.meta_device():
        torch.manual_seed(seed)
        return rlcore.TrainEngine(module_class(regression_weights())).build(devices="cpu", **options)


def module_of(engine: rlcore.TrainEngine) -> Any:
    return engine.executors[0].workers[0].worker.module


def values_of(engine: rlcore.TrainEngine) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in module_of(engine).named_parameters()}


def states_of(engine: rlcore.TrainEngine) -> list[dict[str, Tensor]]:
    optimizer = module_of(engine).optimizer
    return [optimizer.state[parameter] for parameter in module_of(engine).parameters()]


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the plain state of a checkpoint."""
    found = manifest.read_manifest(folder)
    assert found.stamp is not None
    change(found.state)
    manifest.write_manifest(folder, manifest.encode_manifest(found.stamp, found.groups, found.num_parts, found.state))


def as_before(state: dict[str, Any]) -> None:
    """Take away what earlier checkpoints do not say."""
    del state["left_out"]
    for optimizer in state["optimizers"].values():
        del optimizer["parameters"]


# -------------------------------------------------------------------------------------------- weights under adapters


def test_frozen_weights_that_the_source_does_not_have_so_come_back(tmp_path: Path) -> None:
    first, second = engine_of(Adapted, seed=1), engine_of(Adapted, seed=2)
    module_of(first).embed.weight.data[3] = 5.0  # as a merge of peft's writes: no version counter sees it
    before = values_of(first)
    first.save(tmp_path)
    assert manifest.read_manifest(tmp_path).state["left_out"] == ["mix.base_layer.bias", "mix.base_layer.weight"]
    second.load(tmp_path)
    assert values_of(second) == before
    second.save(tmp_path)
    module_of(first).embed.weight.data.zero_()
    first.load(tmp_path)
    assert values_of(first) == before, "what was loaded is no more the source's, and was saved again"


def test_weights_that_train_after_a_resume_begin_as_the_source_has_them(tmp_path: Path) -> None:
    class Further(Adapted):
        def __init__(self, weights: dict[str, Tensor]) -> None:
            super().__init__(weights)
            self.embed.requires_grad_(True)

        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.SGD([one for name, one in self.named_parameters() if "lora" in name])

    engine = engine_of(Adapted)
    engine.save(tmp_path)
    further = engine_of(Further)
    module_of(further).embed.weight.data.zero_()
    further.load(tmp_path)
    assert values_of(further) == values_of(engine)


def test_a_source_that_has_lost_what_was_left_to_it_is_named_and_nothing_changes(tmp_path: Path) -> None:
    engine = engine_of(Adapted)
    engine.save(tmp_path)
    module_of(engine).score.weight.data.fill_(2.0)
    del module_of(engine).weights["mix.bias"]
    before = values_of(engine)
    with pytest.raises(
        CheckpointError,
        match=r"leaves weights to the source of Adapted, which does not have them any more: mix\.base_layer\.bias; "
        "give the module the source that it had",
    ):
        engine.load(tmp_path)
    assert values_of(engine) == before


def test_weights_left_out_that_the_module_does_not_have_are_of_another_model(tmp_path: Path) -> None:
    engine = engine_of(Adapted)
    engine.save(tmp_path)
    rewrite(tmp_path, lambda state: state["left_out"].append("other.weight"))
    with pytest.raises(CheckpointError, match=r"of another model than Adapted: unexpected: other\.weight"):
        engine.load(tmp_path)


def test_an_earlier_checkpoint_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All frozen weights were left out, those that no file has, too."""
    engine = engine_of(Adapted)
    expected = values_of(engine)
    with monkeypatch.context() as patch:
        patch.setattr(BaseWeights, "unchanged", lambda self, device: base_names(module_of(engine)))
        engine.save(tmp_path)
    rewrite(tmp_path, as_before)
    for parameter in module_of(engine).parameters():
        parameter.data.fill_(2.0)
    with caplog.at_level(logging.WARNING):
        engine.load(tmp_path)
    assert values_of(engine) == expected | {"score.weight": [2.0] * 8, "score.bias": [2.0]}
    assert "score.bias, score.weight stay as they were before it was loaded" in caplog.text


# ---------------------------------------------------------------------------------------------------- optimizer states


def test_states_of_another_dtype_than_their_parameter_keep_it(tmp_path: Path) -> None:
    """Torch rounds what has the shape of its parameter, and numbers such as the product of NAdam's momenta."""

    class Policy(Regression):
        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.NAdam(self.parameters())

    first, second = (engine_of(Policy, dtype="bfloat16") for _ in range(2))
    for parameter, state in zip(module_of(first).parameters(), states_of(first), strict=True):
        state |= {"step": torch.tensor(3.0), "mu_product": torch.tensor(1 / 3), "exp_avg": torch.ones_like(parameter)}
        state["exp_avg_sq"] = torch.full_like(parameter, 1 / 3, dtype=torch.float32)
    first.save(tmp_path)
    second.load(tmp_path)
    for own, saved in zip(states_of(second), states_of(first), strict=True):
        assert {key: value.dtype for key, value in own.items()} == {key: value.dtype for key, value in saved.items()}
        assert all(torch.equal(own[key], saved[key]) for key in saved)
    whole = engine_of(Policy)
    whole.load(tmp_path)
    dtypes = {key: value.dtype for key, value in states_of(whole)[0].items()}
    assert dtypes["exp_avg"] == torch.float32, "what had the dtype of its parameter has that of the present one"


def in_order(*names: str) -> Callable[[dict[str, Tensor]], Any]:
    """Return a class whose optimizer has these parameters, and one that the module does not have."""

    class Policy(Regression):
        def on_weights_materialized(self) -> None:
            own = [self.get_parameter(name) for name in names]
            self.optimizer = torch.optim.SGD([*own, torch.zeros(len(names))], lr=0.1, momentum=0.9)

    return Policy


def test_states_of_other_parameters_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    engine = engine_of(in_order("mix.weight", "mix.bias"))
    engine.save(tmp_path)
    turned, other = engine_of(in_order("mix.bias", "mix.weight")), engine_of(in_order("mix.weight", "embed.weight"))
    module_of(turned).mix.bias.data.fill_(2.0)
    before = values_of(turned)
    with pytest.raises(
        CheckpointError,
        match=r"the states of optimizer in the checkpoint are of other parameters: number 0 is mix\.weight \[8, 8\] in "
        r"the checkpoint, and mix\.bias \[8\] in optimizer of the module; make optimizer with its parameters in the "
        "order of the one that was saved",
    ):
        turned.load(tmp_path)
    assert values_of(turned) == before
    with pytest.raises(CheckpointError, match=r"number 1 is mix\.bias \[8\] in .* and embed\.weight \[21, 8\]"):
        other.load(tmp_path)
    rewrite(tmp_path, lambda state: state["optimizers"]["optimizer"]["parameters"][2].__setitem__(1, [7]))
    with pytest.raises(CheckpointError, match=r"number 2 is one that is not of the module \[7\] in .* module \[2\]"):
        engine.load(tmp_path)
    rewrite(tmp_path, as_before)
    engine.load(tmp_path)


# -------------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize(
    ("saved", "loads", "warning"),
    [
        (
            "float32",
            "bfloat16",
            "3 of the checkpoint's 3 weights are float32 and were rounded to bfloat16, the dtype that they have in "
            "this engine; to keep their digits build it with dtype='float32', and where they are frozen with "
            "compute_dtype='float32'",
        ),
        ("bfloat16", "float32", ""),
        ("bfloat16", "bfloat16", ""),
    ],
)
def test_a_load_that_rounds_says_so_once(
    saved: str, loads: str, warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine_of(Regression, dtype=saved).save(tmp_path)
    engine = engine_of(Regression, dtype=loads)
    with caplog.at_level(logging.WARNING):
        engine.load(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [warning] * bool(warning)
