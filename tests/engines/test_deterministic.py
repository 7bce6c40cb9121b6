"""``build(deterministic=True)``: torch's deterministic algorithms in a train engine's calls, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rlcore
from rlcore.engines.executors.deterministic import deterministic_algorithms
from rlcore.errors import RlcoreError

from .train_batches import packed_batch
from .train_policy import policy_gradient


def state() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.mark.parametrize("deterministic", [True, False])
def test_steps_and_scoring_are_inside_and_the_program_is_not(
    policy: Any, qwen2_folder: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that the end of the test takes back what the build sets
    del os.environ["CUBLAS_WORKSPACE_CONFIG"]
    seen: list[tuple[bool, bool, bool]] = []

    class Watched(policy):  # type: ignore[misc]
        def hidden_states(self, batch: Any) -> Tensor:
            seen.append(state())
            hidden: Tensor = super().hidden_states(batch)
            return hidden

    def failing(logprob: Tensor, entropy: Tensor | None, per_token: Any) -> Any:
        raise RuntimeError("planted")

    before = state()
    with rlcore.meta_device():
        module = Watched.from_pretrained(qwen2_folder)
    with rlcore.TrainEngine(module) as engine:
        engine.build(devices="cpu", deterministic=deterministic)
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if deterministic else None)
        for call in (
            lambda: engine.train_batch(packed_batch(), policy_gradient),
            lambda: engine.eval_batch(packed_batch(), policy_gradient),
            lambda: engine.forward_logprobs(packed_batch()),
        ):
            call()
            assert state() == before
        with pytest.raises(RlcoreError, match="planted"):
            engine.train_batch(packed_batch(), failing)
        assert state() == before
    assert len(seen) >= 4 and set(seen) == {(True, False, False) if deterministic else before}


def test_inductor_is_left_as_the_user_has_set_it() -> None:
    import torch._inductor.config

    config: Any = torch._inductor.config
    for chosen in (True, False):
        with config.patch(deterministic=chosen):
            with deterministic_algorithms():
                pass
            assert config.deterministic is chosen


@pytest.mark.gpu
def test_the_same_steps_give_the_same_bits(policy: Any, qwen2_folder: Path) -> None:
    def trained() -> tuple[list[dict[str, float]], dict[str, Tensor]]:
        with rlcore.meta_device():
            module = policy.from_pretrained(qwen2_folder)
        with rlcore.TrainEngine(module) as engine:
            engine.build(devices="cuda:0", launcher="process", compute_dtype="bfloat16", deterministic=True)
            return [engine.train_batch(packed_batch(), policy_gradient) for _ in range(3)], engine.state_dict()

    (metrics, weights), (again, same) = trained(), trained()
    assert metrics == again
    assert all(torch.equal(tensor, same[name]) for name, tensor in weights.items())
