"""Ranks that share sequences train as plain PyTorch does, whatever the heads, lengths, losses and layers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from rlcore.ops import ppo_clip

from .train_batches import packed_batch
from .train_policy import Build, engines_of, truth_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import this file

pytestmark = pytest.mark.slow

STEPS = ((12, 3, 7, 2, 9, 5, 14), 16384), ((12, 3, 7, 2, 9, 5, 14), 15), ((41,), 16384)
"""Lengths of sequences, and the most tokens of a micro-batch. 52 tokens divide by 4, 41 and parts of 15 do not."""


@pytest.fixture(scope="module")
def build(
    policy: Any, qwen2_folder: Path, shared_devices: tuple[str, ...], short_runtime_folder: Path
) -> Iterator[Build]:
    with engines_of(policy, qwen2_folder, shared_devices, short_runtime_folder) as get:
        yield get


@pytest.mark.parametrize(
    ("workers", "options"),
    [(4, {}), (4, {"activation_checkpointing": True}), (4, {"sequence_parallel_size": 2}), (2, {"compile": True})],
    ids=["keys and values replicated", "recomputed", "two groups", "compiled"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, when it compiles
def test_steps_and_log_probs(
    build: Build, policy: Any, workers: int, options: dict[str, Any], qwen2_folder: Path
) -> None:
    engine = build(workers, **{"sequence_parallel_size": workers} | options)
    truth = truth_of(policy, qwen2_folder)
    for lengths, max_tokens in STEPS:
        batch, options = packed_batch(lengths), {"max_tokens_per_micro_batch": max(max_tokens, *lengths)}
        truth.assert_step(engine.train_batch(batch, ppo_clip(), **options), batch, ppo_clip())
        truth.assert_logprobs(engine.forward_logprobs(batch, temperature=0.7, **options), batch, temperature=0.7)
    truth.assert_weights(engine.state_dict())
