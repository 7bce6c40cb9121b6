"""Parts of a train engine that leave the device, come back, or are dropped: what moves, and what an engine says to call
when one is away or empty: only what works, and first whether it is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from rlcore.engines.offload.storages import distinct_storages
from rlcore.errors import DeviceError, InvalidInputError, StateError, UnsupportedError
from rlcore.ops import ppo_clip
from tests.accuracy import assert_within_rounding

from .train_batches import padded_batch
from .train_policy import Regression, regression_weights


def module_of(engine: rlcore.TrainEngine) -> Any:
    return engine.executors[0].workers[0].worker.module


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


def test_an_optimizer_that_a_method_made_is_not_taken_back_without_its_states() -> None:
    """They would be undefined memory, as the release of all optimizers drops them."""

    class Late(Regression):
        def on_weights_materialized(self) -> None:
            """Make no optimizer yet."""

        def make_optimizer(self) -> None:
            super().on_weights_materialized()

    with rlcore.meta_device():
        module = Late(regression_weights())
    with rlcore.TrainEngine(module).build(devices="cpu") as engine:
        engine.meta("optimizer")
        engine.onload("optimizer")  # there is none
        engine.make_optimizer()
        train_once(engine)
        for leave in (engine.meta, lambda tag: (engine.offload(tag), engine.meta(tag))):
            leave("optimizer")
            with pytest.raises(StateError, match=r"released its optimizer; call load\(path\), or restart\(\)"):
                engine.onload("optimizer")
            engine.restart()
            engine.make_optimizer()
            train_once(engine)


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


def test_a_restart_that_failed_can_be_tried_again(engine: rlcore.TrainEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = train_once(engine)

    def fail(self: Any, options: Any) -> None:
        raise DeviceError("planted")

    with monkeypatch.context() as patch, pytest.raises(DeviceError, match="planted"):
        patch.setattr(rlcore.TrainEngine, "_build_workers", fail)
        engine.restart()
    with pytest.raises(StateError, match=r"no workers since its restart failed; call restart\(\) again"):
        train_once(engine)
    engine.restart()
    assert train_once(engine) == loss


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


# ---------------------------------------------------------------------------------------------------------------- moves


def test_after_offload_every_storage_has_zero_bytes_and_training_goes_on_bit_equal(
    policy: Any, qwen2_folder: Path
) -> None:
    def losses(offloads: bool) -> list[float]:
        with rlcore.meta_device():
            module = policy.from_pretrained(qwen2_folder)
        found = []
        with rlcore.TrainEngine(module) as engine:
            engine.build(devices="cpu", onload=not offloads)
            for _ in range(4):
                if offloads:
                    assert_away(engine)
                    engine.onload()
                found.append(engine.train_batch(padded_batch(), ppo_clip())["loss"])
                if offloads:
                    engine.offload()
        return found

    assert losses(offloads=True) == losses(offloads=False)


def assert_away(engine: rlcore.TrainEngine) -> None:
    module = module_of(engine)
    state = [value for values in module.optimizer.state.values() for value in values.values()]
    for storage in distinct_storages([*module.parameters(), *state]):
        assert storage.nbytes() == 0
    report = engine.memory_report()[0]["tags"]
    assert report["weights"]["device_bytes"] == report["optimizer"]["device_bytes"] == 0
    assert report["weights"]["host_bytes"] > 0


def test_reports_are_measured(engine: rlcore.TrainEngine) -> None:
    parameters = sum(storage.nbytes() for storage in distinct_storages(module_of(engine).parameters()))
    (first,) = engine.offload("weights")["weights"]
    assert first.moved_bytes == first.freed_device_bytes == parameters
    assert first.first_use and first.seconds > 0
    (back,) = engine.onload("weights")["weights"]
    assert back.moved_bytes == parameters and back.freed_device_bytes == -parameters
    assert not engine.offload("weights")["weights"][0].first_use
    assert engine.offload("weights") == {}, "a double move does nothing"


@pytest.mark.parametrize("move", ["offload", "meta"])
def test_touching_what_is_away_raises_with_the_call_that_fixes_it(engine: rlcore.TrainEngine, move: str) -> None:
    module = module_of(engine)
    state = "offloaded" if move == "offload" else "released"
    tokens = {"input_ids": torch.arange(4), "cu_seqlens": torch.tensor([0, 4])}
    getattr(engine, move)("weights")
    uses: list[Callable[[], Any]] = [
        lambda: module(torch.zeros(1, 2, dtype=torch.long)),
        lambda: module.hidden_states(tokens),
        module.state_dict,
        module.optimizer.step,
    ]
    for use in uses:
        with pytest.raises(StateError, match=rf"of this Policy are {state}; call the engine's onload\('weights'\)"):
            use()
    calls: list[Callable[[], Any]] = [
        lambda: engine.total([1]),
        lambda: engine.train_batch(padded_batch(), ppo_clip()),
        lambda: engine.forward_logprobs(padded_batch()),
        lambda: engine.save("unused"),
        lambda: engine.export("unused"),
        engine.state_dict,
    ]
    for call in calls:
        with pytest.raises(StateError, match=rf"needs the weights of the train engine, which are {state}; call onload"):
            call()


def test_an_optimizer_that_is_away_is_guarded(engine: rlcore.TrainEngine) -> None:
    engine.train_batch(padded_batch(), ppo_clip())
    engine.offload("optimizer")
    for use in (module_of(engine).optimizer.step, module_of(engine).optimizer.state_dict):
        with pytest.raises(StateError, match=r"optimizer of this Policy are offloaded; call the engine's onload"):
            use()
    with pytest.raises(StateError, match=r"train_batch\(\) needs the optimizer of the train engine"):
        engine.train_batch(padded_batch(), ppo_clip())
    engine.onload("optimizer")
    engine.train_batch(padded_batch(), ppo_clip())


STATES = {
    "loaded": [],
    "offloaded": ["offload"],
    "released": ["meta"],
    "empty": ["meta", "onload"],
}
WEIGHTS_AFTER = {
    ("loaded", "onload"): "loaded",
    ("loaded", "offload"): "offloaded",
    ("loaded", "meta"): "released",
    ("offloaded", "onload"): "loaded",
    ("offloaded", "offload"): "offloaded",
    ("offloaded", "meta"): "released",
    ("released", "onload"): "empty",
    ("released", "offload"): "there is nothing to offload",
    ("released", "meta"): "released",
    ("empty", "onload"): "empty",
    ("empty", "offload"): "have no values yet",
    ("empty", "meta"): "released",
}


@pytest.mark.parametrize("state", STATES)
def test_every_move_from_every_state_of_the_weights(engine: rlcore.TrainEngine, state: str) -> None:
    weights = engine.state_dict()
    for move in ("onload", "offload", "meta"):
        engine.meta("weights")
        engine.onload("weights")
        engine.load_state_dict(weights)
        for step in STATES[state]:
            getattr(engine, step)("weights")
        assert engine.state["weights"] == state
        expected = WEIGHTS_AFTER[state, move]
        if expected in STATES:
            getattr(engine, move)("weights")
            assert engine.state["weights"] == expected
        else:
            with pytest.raises(StateError, match=expected):
                getattr(engine, move)("weights")
            assert engine.state["weights"] == state


def test_a_released_optimizer_does_not_come_back_empty(engine: rlcore.TrainEngine) -> None:
    engine.meta("optimizer")
    for tags in (("optimizer",), ()):
        with pytest.raises(StateError, match=r"released its optimizer; call load\(path\), or restart\(\)"):
            engine.onload(*tags)
    assert engine.state["weights"] == "loaded", "a refused move moves nothing"


def test_an_unknown_tag_is_named(engine: rlcore.TrainEngine) -> None:
    with pytest.raises(InvalidInputError, match="has the tags weights, optimizer, grads; got 'kv_cache'"):
        engine.offload("kv_cache")


def test_rlites_names_move_the_same(engine: rlcore.TrainEngine) -> None:
    engine.cpu()
    assert set(engine.state.values()) == {"offloaded"}
    engine.cuda("weights")
    assert engine.state["weights"] == "loaded"
    engine.to("cuda")
    engine.to("cpu", "grads")
    assert engine.state == {"weights": "loaded", "optimizer": "loaded", "grads": "offloaded"}
    engine.to("meta")
    assert set(engine.state.values()) == {"released"}


def test_to_names_a_registered_device_by_its_kind(engine: rlcore.TrainEngine) -> None:
    with pytest.raises(InvalidInputError, match=r"^to\(\) takes 'meta' or the name of a registered device: no "):
        engine.to("disk")
    for wrong in ("cuda:1", torch.device("cuda"), None):
        with pytest.raises(InvalidInputError, match=r"takes the name of a kind of device.* build\(devices=...\); got "):
            engine.to(wrong)  # type: ignore[arg-type]


def test_a_module_without_engine_can_be_offloaded() -> None:
    module = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with rlcore.offloaded(module, optimizer) as report:
        assert report.moved_bytes >= 3 * 64 * 65 * 4
        assert all(storage.nbytes() == 0 for storage in distinct_storages(module.parameters()))
        with pytest.raises(StateError, match="leave the `with"):
            module(torch.ones(1, 64))
        with pytest.raises(StateError, match="leave the `with"):
            optimizer.step()
    assert all(torch.equal(expected[name], tensor) for name, tensor in module.state_dict().items())
    optimizer.step()


def test_a_storage_that_cannot_be_freed_is_refused_with_the_remedy() -> None:
    module = torch.nn.Linear(2, 2)
    module.weight = torch.nn.Parameter(torch.frombuffer(bytearray(16), dtype=torch.float32).view(2, 2))
    message = r"of shape \[2, 2\] made from a file or a numpy array.*tensor.clone"
    with pytest.raises(UnsupportedError, match=message), rlcore.offloaded(module):
        pass
    module(torch.ones(1, 2))


def test_gradients_leave_and_come_back_and_nothing_touches_freed_memory(engine: rlcore.TrainEngine) -> None:
    alone = engine.call("accumulate", 3, gather="first")
    engine.offload("grads")
    assert all(parameter.grad is None for parameter in module_of(engine).parameters())
    assert engine.call("accumulate", 3, gather="first") == alone, "autograd starts a new gradient meanwhile"
    engine.onload("grads")
    of_three = engine.call("accumulate", 3, gather="first")
    assert_within_rounding(of_three, 3 * alone, terms=2 * 32, dtype=torch.float32, what="of both, and one more")
    engine.meta("grads")
    engine.onload("grads")
    assert engine.call("accumulate", 3, gather="first") == alone, "after a release gradients start from none"


def test_gradients_that_are_away_are_not_passed_over_by_zero_grad(engine: rlcore.TrainEngine) -> None:
    module = module_of(engine)
    engine.call("accumulate", 1)
    engine.offload("grads")
    for owner in (module, module.optimizer):
        with pytest.raises(StateError, match=r"in host memory, where zero_grad\(\) does not reach them; drop them by"):
            owner.zero_grad()
    engine.onload("grads")
    assert any(parameter.grad is not None for parameter in module.parameters())
    module.optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in module.parameters())
    engine.offload("grads")
    module.zero_grad()  # there are none
