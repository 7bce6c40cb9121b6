"""Weights, optimizer and gradients leave the device and come back, and training goes on as if they had stayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlcore.conformance.promise import promise
from rlcore.conformance.under_test import UnderTest, nbytes, same_weights
from rlcore.errors import StateError

TAGS = ("weights", "optimizer", "grads")


@pytest.fixture
def stepped(train: Any, batch: Any, loss_fn: Any) -> Any:
    """After a step, which gives the optimizer its state."""
    train.train_batch(batch, loss_fn)
    return train


@promise("The report has all tags, and the bytes of weights and optimizer.", "memory_report")
def test_memory_is_reported_by_tag(stepped: Any) -> None:
    (report,) = stepped.memory_report()
    assert set(report["tags"]) == set(TAGS)
    num_weights = sum(tensor.numel() for tensor in stepped.initial.values())
    assert nbytes(stepped, "weights")[0] >= num_weights, "less than a byte for each weight"
    assert nbytes(stepped, "optimizer")[0] >= num_weights


MOVED = "What leaves the device frees its memory, and comes back as it was: training goes on bit for bit."


@pytest.mark.parametrize("tags", [(), ("weights",), ("optimizer",), ("weights", "grads")], ids=str)
@promise(MOVED, "offload", "onload")
def test_training_goes_on_after_an_offload(train: Any, make_batch: Any, loss_fn: Any, tags: tuple[str, ...]) -> None:
    def losses(moves: bool) -> list[float]:
        found = []
        for number in range(3):
            if moves:
                train.offload(*tags)
                for tag in tags or TAGS:
                    assert nbytes(train, tag)[0] == 0, f"the {tag} are still on the device"
                train.onload(*tags)
            found.append(train.train_batch(make_batch(seed=number), loss_fn)["loss"])
        return found

    stayed = losses(moves=False), train.state_dict()
    train.load_state_dict(train.initial)
    train.call("forget_steps")
    assert losses(moves=True) == stayed[0]
    assert same_weights(train.state_dict(), stayed[1])


@promise("A report of a move says what it moved and freed; a move to where it is does nothing.", "offload", "onload")
def test_a_move_is_measured(stepped: Any) -> None:
    on_device, _ = nbytes(stepped, "weights")
    (away,) = stepped.offload("weights")["weights"]
    assert away.moved_bytes > 0 and away.freed_device_bytes > 0
    assert nbytes(stepped, "weights")[1] >= away.moved_bytes
    assert stepped.offload("weights") == {}
    (back,) = stepped.onload("weights")["weights"]
    assert back.moved_bytes == away.moved_bytes
    assert nbytes(stepped, "weights") == (on_device, 0)


@promise(
    "What is away is not used: each call that needs it is refused, and names the one that helps.", "offload", "meta"
)
@pytest.mark.parametrize("move", ["offload", "meta"])
def test_what_is_away_is_not_used(stepped: Any, batch: Any, loss_fn: Any, move: str) -> None:
    getattr(stepped, move)("weights")
    calls: list[Callable[[], Any]] = [
        lambda: stepped.train_batch(batch, loss_fn),
        lambda: stepped.forward_logprobs(batch),
        lambda: stepped.total([1]),
        stepped.state_dict,
    ]
    for call in calls:
        with pytest.raises(StateError, match=r"needs the weights of the train engine, .*; call onload\('weights'\)"):
            call()


@promise(
    "Released weights are filled by load_state_dict(); a released optimizer comes back by restart().", "meta", "onload"
)
def test_what_was_released_is_filled(stepped: Any, batch: Any) -> None:
    state, scores = stepped.state_dict(), stepped.forward_logprobs(batch)
    stepped.meta("weights", "grads")
    assert nbytes(stepped, "weights") == (0, 0)
    stepped.onload("weights", "grads")
    assert stepped.state["weights"] == "empty"
    with pytest.raises(StateError, match=r"are empty; call load\(path\), load_state_dict\(state\)"):
        stepped.forward_logprobs(batch)
    stepped.load_state_dict(state)
    assert (stepped.forward_logprobs(batch) == scores).all()
    stepped.meta("optimizer")
    assert nbytes(stepped, "optimizer") == (0, 0)
    with pytest.raises(StateError, match=r"released its optimizer; call load\(path\), or restart\(\)"):
        stepped.onload("optimizer")


@promise("An engine that is built with onload=False waits in host memory.", "build", "offload", "onload")
def test_an_engine_can_be_built_into_host_memory(under_test: UnderTest, train: Any) -> None:
    with under_test.train(onload=False) as engine:
        assert nbytes(engine, "weights")[0] == 0
        engine.onload()
        assert same_weights(engine.state_dict(), train.initial)
