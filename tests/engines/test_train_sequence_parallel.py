"""Workers that share sequences train as plain PyTorch does, whatever the heads, lengths, losses and layers."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

import rlcore
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.ops import gspo
from rlcore.packed.sequence_parallel import own_tokens
from tests.accuracy import rounding

from . import long_sequence
from .plain_training import Truth, assert_metrics
from .train_batches import VOCAB, packed_batch
from .train_policy import (
    Build,
    Place,
    Regression,
    loss_on,
    places,
    regression_weights,
    train_policy,
    truth_of,
    two_of,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import this file

UNEVEN = ((12, 3, 7, 2, 9, 5, 14), 16384), ((12, 3, 7, 2, 9, 5, 14), 15), ((41,), 41)
"""Lengths of sequences, and the most tokens of a micro-batch: 52 tokens divide by 4, 41 and those of parts do not."""

SHARED = {"sequence_parallel_size": 2}
multigpu = pytest.mark.multigpu
on_two = places(("cpu", 2, ()), ("cuda", 2, multigpu))


class Sliced(train_policy()):  # type: ignore[misc]
    """It has methods of the user's own."""

    def own_logits(self, tokens: dict[str, Tensor], marks: Tensor) -> tuple[int, list[int]]:
        """The number of hidden states, and the marks of their tokens."""
        with torch.no_grad():
            return len(self.hidden_states(tokens)), marks.tolist()


@pytest.fixture(scope="module")
def policy() -> Any:
    return Sliced


# ----------------------------------------------------------------------------------- training, on several workers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "options"),
    [
        pytest.param(Place("cpu", 4), {"sequence_parallel_size": 4}, id="keys and values replicated"),
        pytest.param(Place("cpu", 4), SHARED | {"activation_checkpointing": "selective"}, id="two groups"),
        pytest.param(Place("cpu", 2), SHARED | {"activation_checkpointing": True}, id="recomputed"),
        pytest.param(Place("cpu", 4), SHARED | {"replicas": 2}, id="a group in each replica"),
        pytest.param(Place("cuda", 2), SHARED, id="2 cuda", marks=multigpu),
        pytest.param(Place("cuda", 2), SHARED | {"activation_checkpointing": True}, id="2 cuda, rec.", marks=multigpu),
        pytest.param(Place("cuda", 4), {"sequence_parallel_size": 4}, id="4 cuda, replicated", marks=multigpu),
    ],
)
def test_steps_and_log_probs_are_those_of_plain_pytorch(
    build: Build, policy: Any, qwen2_folder: Path, place: Place, options: dict[str, Any]
) -> None:
    engine, truth = build(place.workers, place.device, **options), truth_of(policy, qwen2_folder, place.device)
    loss = loss_on(place.device)
    for lengths, max_tokens in UNEVEN:
        batch, limit = packed_batch(lengths), {"max_tokens_per_micro_batch": max_tokens}
        evaluated = engine.eval_batch(batch, loss, **limit)
        found = engine.train_batch(batch, loss, **limit)
        step = truth.step(batch, loss)
        assert_metrics(evaluated, *step)
        assert_metrics(found, *step)
        truth.assert_logprobs(engine.forward_logprobs(batch, temperature=0.7, **limit), batch, temperature=0.7)
    truth.assert_weights(engine.state_dict())


@pytest.mark.slow
def test_a_long_sequence_is_that_of_one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that takes any length and the width of a 0.5B; here the tiny one, in one run and in two."""
    num_tokens, file = 512, str(tmp_path / "one.pt")
    shape = ["--tiny", "--tokens", str(num_tokens)]
    found = long_sequence.main(shape)
    limit = rounding(num_tokens)  # of sums over tokens, in another order
    assert {"logprob", "loss", "grad_norm", "weights"} == found["apart"].keys()
    assert max(found["apart"].values()) <= limit, found["apart"]

    ran: list[dict[str, int]] = []
    run = long_sequence.run
    monkeypatch.setattr(long_sequence, "run", lambda *args: ran.append(args[2]) or run(*args))
    assert long_sequence.main([*shape, "--save", file]) == {} and ran == [{}]
    assert long_sequence.main([*shape, "--beside", file])["apart"] == found["apart"]
    assert ran == [{}, {"sequence_parallel_size": 4}]
    with pytest.raises(SystemExit, match="'tokens': 512}; this run is of "):
        long_sequence.main(["--tiny", "--tokens", "256", "--beside", file])


@pytest.mark.slow
@places(("cpu", 4, ()), ("cuda", 2, multigpu))
def test_a_loss_of_sequences_sees_all_of_each(build: Build, policy: Any, qwen2_folder: Path, place: Place) -> None:
    engine = build(place.workers, place.device, sequence_parallel_size=place.workers)
    truth, batch = truth_of(policy, qwen2_folder, place.device), packed_batch()
    loss = gspo(clip_low=1.0, clip_high=1.0)
    lengths = batch["cu_seqlens"].diff()
    counts = torch.stack([part.sum() for part in batch["loss_mask"].split(lengths.tolist())])
    edges = torch.nn.functional.pad(counts.cumsum(0), (1, 0))

    def of_all(logprob: Tensor, entropy: Tensor | None, per_token: Any) -> Any:
        mask = torch.ones_like(logprob, dtype=torch.bool)
        return loss(logprob, entropy, {**per_token, "cu_seqlens": edges, "token_mask": mask})

    for max_tokens in (16384, 15):
        found = engine.train_batch(batch, loss, max_tokens_per_micro_batch=max_tokens)
        truth.assert_step(found, batch, of_all)
    truth.assert_weights(engine.state_dict())


@pytest.mark.slow
@on_two
def test_adapters_alone_train(
    build: Build, qwen2_folder: Path, shared_devices: tuple[str, ...], policy: Any, place: Place
) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    from .test_train_lora import TARGETS, lora_module, plain_with

    build(2, place.device, **SHARED)  # its processes and groups are there already
    loss = loss_on(place.device)
    with rlcore.TrainEngine(lora_module(policy, qwen2_folder, target_modules=TARGETS)) as engine:
        engine.build(devices=two_of(place.device, shared_devices), **SHARED)
        fresh = engine.state_dict(adapters="only")
        adapted = partial(plain_with, fresh, policy, qwen2_folder, target_modules=TARGETS)
        truth = Truth(adapted, device=place.device)
        for lengths, _ in UNEVEN:
            batch = packed_batch(lengths)
            truth.assert_step(engine.train_batch(batch, loss), batch, loss)
        truth.assert_weights(engine.state_dict(adapters="only"), adapters="only")


@pytest.mark.slow
def test_arguments_are_split_as_hidden_states_are(build: Build) -> None:
    engine, batch = build(4, sequence_parallel_size=2), packed_batch((6, 3))
    tokens = {"input_ids": batch["input_ids"], "cu_seqlens": batch["cu_seqlens"]}
    marks = rlcore.NeedParallel(torch.arange(9), type="seq")
    assert engine.own_logits(tokens, marks) == [(5, [0, 1, 2, 3, 4]), (4, [5, 6, 7, 8])] * 2
    rows = rlcore.NeedParallel([1, 2, 3, 4, 5], balance_by=[1, 1, 9, 1, 1])
    assert engine.call("squares", rows, gather="cat") == [1, 4, 9, 16, 25], "workers of a group have the same rows"


# ------------------------------------------------------------------------------------ refusals, before any worker


def refusal(module: Any, **options: Any) -> str:
    with rlcore.TrainEngine(module) as engine, pytest.raises((InvalidInputError, UnsupportedError)) as raised:
        engine.build(devices=[f"cpu:{number}" for number in range(3)], **options)
    return str(raised.value)


def test_what_cannot_be_shared_is_refused_before_a_worker_starts(policy: Any, qwen2_folder: Path) -> None:
    with rlcore.meta_device():
        module, own = policy.from_pretrained(qwen2_folder), Regression(regression_weights())
    found = refusal(module, sequence_parallel_size=3)
    assert "sequence_parallel_size=3 of Sliced" in found and "its 4 query heads do not divide by 3" in found
    found = refusal(own, sequence_parallel_size=3)
    assert "sequence_parallel_size=3 of Regression" in found and "does not define check_sequence_parallel()" in found
    found = refusal(module, sequence_parallel_size=0)
    assert "sequence_parallel_size must be a whole number of at least 1, got 0" in found


def test_each_token_is_of_one_worker() -> None:
    for num_tokens in (0, 1, 5, 8, VOCAB):
        parts = [own_tokens(num_tokens, rank, 4) for rank in range(4)]
        assert [token for part in parts for token in part] == list(range(num_tokens))
