"""Steps, losses and log-probs: those of plain PyTorch, however the batch is cut into micro-batches and workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlcore.conformance.promise import promise
from rlcore.conformance.reference import TrainerTruth
from rlcore.conformance.under_test import same_weights
from rlcore.errors import InvalidInputError, RlcoreError, WorkerError

STEP = "A step has the loss, the gradients and the weights that plain PyTorch has, however the batch is cut."
CUTS = [
    pytest.param(1, 10**6, id="whole", marks=promise(STEP, "train_step")),
    pytest.param(1, 16, id="micro-batches", marks=promise(STEP, "train_step")),
    pytest.param(2, 10**6, id="two workers", marks=promise(STEP, "several workers", "train_step")),
    pytest.param(2, 16, id="two workers, micro-batches", marks=promise(STEP, "several workers", "train_step")),
]


@pytest.mark.parametrize(("workers", "max_tokens"), CUTS)
def test_steps_are_those_of_plain_pytorch(
    *, train_on: Any, truth: TrainerTruth, make_batch: Any, loss_fn: Any, workers: int, max_tokens: int
) -> None:
    engine = train_on(workers)
    for number in range(3):
        batch = make_batch(seed=number)
        found = engine.train_batch(batch, loss_fn, max_tokens_per_micro_batch=max_tokens)
        assert truth.wrong_step(found, batch, loss_fn) == "", f"step {number}"
        assert found["num_tokens"] == int(batch["loss_mask"].sum())
        assert found["lr/optimizer"] == pytest.approx(1e-2 * (1 / 3 + number / 10 * 2 / 3)), f"step {number}"
    assert truth.wrong_weights(engine.state_dict()) == ""


@promise("The temperature divides the logits that the loss function's log-probs and entropies are of.", "train_step")
def test_the_temperature_is_the_losses(train: Any, truth: TrainerTruth, batch: Any, loss_fn: Any) -> None:
    found = train.train_batch(batch, loss_fn, temperature=0.7)
    assert truth.wrong_step(found, batch, loss_fn, temperature=0.7) == ""


@promise("A gradient that is not finite is refused, and takes no step.", "train_step")
def test_an_infinite_gradient_takes_no_step(train: Any, truth: TrainerTruth, batch: Any, loss_fn: Any) -> None:
    with pytest.raises(RlcoreError):
        train.train_batch(batch, lambda logprob, *_: (logprob * 1e38 * 1e38, {}))
    assert same_weights(train.state_dict(), train.initial), "weights were changed"
    assert truth.wrong_step(train.train_batch(batch, loss_fn), batch, loss_fn) == "", "the optimizer was changed"


EVALUATE = "An evaluation has the loss that a step would have, and changes nothing."


@pytest.mark.parametrize("max_tokens", [10**6, 16], ids=["whole", "micro-batches"])
@promise(EVALUATE, "evaluate")
def test_an_evaluation_changes_nothing(
    train: Any, truth: TrainerTruth, batch: Any, loss_fn: Any, max_tokens: int
) -> None:
    found = train.eval_batch(batch, loss_fn, max_tokens_per_micro_batch=max_tokens)
    assert truth.wrong_loss(found, batch, loss_fn) == ""
    assert same_weights(train.state_dict(), train.initial), "weights were changed"
    assert truth.wrong_step(train.train_batch(batch, loss_fn), batch, loss_fn) == "", "gradients were left"


SCORES = "The score of a token is its log-prob given those before it, at the temperature that is asked for."
WORKERS = [
    pytest.param(1, id="one worker", marks=promise(SCORES, "score")),
    pytest.param(2, id="two workers", marks=promise(SCORES, "several workers", "score")),
]


@pytest.mark.parametrize("workers", WORKERS)
def test_log_probs_are_those_of_plain_pytorch(train_on: Any, truth: TrainerTruth, batch: Any, workers: int) -> None:
    engine = train_on(workers)
    for temperature in (0.7, 1.0, 1.3):
        for max_tokens in (10**6, 16):
            found = engine.forward_logprobs(batch, temperature=temperature, max_tokens_per_micro_batch=max_tokens)
            assert truth.wrong_logprobs(found, batch, temperature) == "", f"temperature {temperature}"
            assert (found[~batch["loss_mask"]] == 0).all()
    assert same_weights(engine.state_dict(), engine.initial)


@promise("A batch that cannot be run is refused, and nothing is changed.", "train_step", "score")
def test_bad_batches_are_refused(train: Any, truth: TrainerTruth, batch: Any, loss_fn: Any) -> None:
    beyond, nan = dict(batch), dict(batch)
    beyond["input_ids"] = batch["input_ids"].clone()
    beyond["input_ids"][1, 1] = 10**6
    nan["advantages"] = torch.full_like(batch["advantages"], torch.nan)
    for bad in (beyond, nan, {"input_ids": batch["input_ids"].float()}, batch | {"advantages": torch.zeros(4)}):
        with pytest.raises(InvalidInputError):
            train.train_batch(bad, loss_fn)
    with pytest.raises(InvalidInputError, match="a sequence has 14 tokens"):
        train.forward_logprobs(batch, max_tokens_per_micro_batch=13)
    assert truth.wrong_step(train.train_batch(batch, loss_fn), batch, loss_fn) == ""


@promise("Methods of the module are called on the worker's own, and what they raise names them.", "module")
def test_methods_of_the_module_are_called(train: Any) -> None:
    assert train.total([1, 2], offset=3) == [6]
    assert train.call("total", [4], gather="first") == 4
    with pytest.raises(WorkerError, match=r"module.fail\(\) failed on rank 0 \(.+\): KeyError: 'planted by the suite'"):
        train.fail()
    assert train.total([1]) == [1], "the engine goes on"
