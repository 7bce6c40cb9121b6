"""What an engine says to call when a part of it is away or empty: only what works, and first whether it is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from rlcore.errors import StateError
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import ppo_clip

from .train_batches import padded_batch


@pytest.fixture(scope="session")
def policy() -> Any:
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        def on_weights_materialized(self) -> None:
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            self.optimizer = torch.optim.AdamW(trained, lr=1e-2)

        def total(self, rows: list[int]) -> int:
            return sum(rows)

    return Policy


def train_once(engine: rlcore.TrainEngine) -> float:
    return engine.train_batch(padded_batch(), ppo_clip())["loss"]


def test_empty_weights_of_a_trainer_are_filled_by_what_it_names(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    state = engine.state_dict()
    engine.save(tmp_path / "checkpoint")
    named = r"call load\(path\), load_state_dict\(state\) or restart\(\)"
    expected = engine.forward_logprobs(padded_batch())
    fills: list[Callable[[], Any]] = [
        lambda: engine.load(tmp_path / "checkpoint"),
        lambda: engine.load_state_dict(state),
        engine.restart,
    ]
    for fill in fills:
        engine.meta("weights")
        with pytest.raises(StateError, match=rf"are released; call onload\('weights'\), then {named[5:]}$"):
            train_once(engine)
        engine.onload("weights")
        with pytest.raises(StateError, match=rf"are empty; {named}$"):
            train_once(engine)
        with pytest.raises(StateError, match=rf"have no values yet; {named} first, or meta\('weights'\)$"):
            engine.offload("weights")
        fill()
        assert torch.equal(engine.forward_logprobs(padded_batch()), expected)


def test_adapters_alone_do_not_fill_empty_weights(policy: Any, qwen2_folder: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs the package peft")
    with rlcore.meta_device():
        module = policy.from_pretrained(qwen2_folder)
        module.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with rlcore.TrainEngine(module).build(devices="cpu") as engine:
        state = engine.state_dict(adapters="only")
        expected = engine.forward_logprobs(padded_batch())
        engine.meta("weights")
        engine.onload("weights")
        with pytest.raises(
            StateError, match=r"load_state_dict\(\) needs .* are empty; call load\(path\) or restart\(\)$"
        ):
            engine.load_state_dict(state)
        engine.restart()
        engine.load_state_dict(state)
        assert torch.equal(engine.forward_logprobs(padded_batch()), expected)


def test_empty_weights_of_a_sampler_are_filled_by_a_sync_or_a_load(qwen2_folder: Path) -> None:
    with rlcore.InferenceEngine(qwen2_folder).build(devices="cpu") as engine:
        engine.meta("weights")
        engine.onload("weights")
        with pytest.raises(
            StateError, match=r"no values yet; call sync_weights\(\) into it or load\(path\) first, or m"
        ):
            engine.offload("weights")


def test_a_released_optimizer_comes_back_by_restart(engine: rlcore.TrainEngine) -> None:
    losses = [train_once(engine) for _ in range(2)]
    engine.meta("optimizer")
    message = r"released its optimizer; call load\(path\), or restart\(\), which begins again at the last checkpoint"
    with pytest.raises(StateError, match=message):
        engine.onload("optimizer")
    engine.restart()
    assert [train_once(engine) for _ in range(2)] == losses, "there is no checkpoint: from the model folder"


@pytest.mark.parametrize("moves", [["offload"], ["meta"], ["meta", "onload"]], ids="-".join)
def test_a_closed_engine_says_so_wherever_its_weights_were(engine: rlcore.TrainEngine, moves: list[str]) -> None:
    for move in moves:
        getattr(engine, move)("weights")
    infer = rlcore.InferenceEngine("unused")
    engine.close()
    calls: list[Callable[[], Any]] = [
        lambda: train_once(engine),
        lambda: engine.eval_batch(padded_batch(), ppo_clip()),
        lambda: engine.forward_logprobs(padded_batch()),
        lambda: engine.total([1]),
        lambda: engine.save("unused"),
        lambda: engine.load("unused"),
        lambda: engine.export("unused"),
        lambda: engine.load_state_dict({}),
        lambda: engine.sync_weights(infer),
        lambda: engine.onload("weights"),
        engine.state_dict,
    ]
    for call in calls:
        with pytest.raises(StateError, match=r"^the train engine is closed$"):
            call()
