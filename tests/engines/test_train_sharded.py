"""The train engine on several workers: what one worker computes, to rounding, however the weights and tokens are cut.

Engines are shared by the tests of this file, which bring them back to the weights of their folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

import rlcore
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import ppo_clip

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import this file

VOCAB = 21
WORLDS = [2, 3]


@pytest.fixture(scope="module")
def policy() -> Any:
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)  # else signs of 0 to rounding
            self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=10)

        def forget_steps(self) -> None:
            self.on_weights_materialized()

        def total(self, rows: Any) -> int:
            return sum(rows)

        def local_sizes(self) -> dict[str, int]:
            return {name: parameter.to_local().numel() for name, parameter in self.named_parameters()}

        def mean_gradient(self, token: int) -> float:
            self(torch.full((1, 4), token, device=self.device)).logits.square().mean().backward()
            norm = self.model.norm.weight.grad.full_tensor().norm()
            self.zero_grad()
            return float(norm)

    return Policy


Build = Callable[..., rlcore.TrainEngine]


@pytest.fixture(scope="module")
def build(policy: Any, qwen2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    """``build(workers, device="cpu", folder=..., module_class=..., **options)``; one engine for each arguments."""
    engines: dict[str, rlcore.TrainEngine] = {}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")

        def get(workers: int, device: str = "cpu", folder: Path = qwen2_folder, **options: Any) -> rlcore.TrainEngine:
            key = f"{workers} {device} {folder} {options}"
            if key not in engines:
                # the settings of tests are taken back after each
                patch.setenv("RLCORE_RUNTIME", str(tmp_path_factory.mktemp("runtime")))
                with rlcore.meta_device():
                    module = policy.from_pretrained(folder)
                engine = stack.enter_context(rlcore.TrainEngine(module))
                devices = [f"{device}:{index}" for index in range(workers)]
                shards = workers // options.get("replicas", 1)
                engines[key] = engine.build(devices=devices, data_parallel_size=shards, timeout_s=120, **options)
                engines[key].initial = engine.state_dict()  # type: ignore[attr-defined]
            engine = engines[key]
            engine.load_state_dict(engine.initial)  # type: ignore[attr-defined]
            engine.forget_steps()
            return engine

        yield get


def batch_of(lengths: tuple[int, ...] = (12, 3, 7, 2, 9, 5, 14), seed: int = 0) -> dict[str, Tensor]:
    """Packed sequences of these lengths, of which all but the first two tokens are trained on."""
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    place_T = torch.cat([torch.arange(length) for length in lengths])
    return {
        "input_ids": torch.randint(VOCAB, (sum(lengths),), generator=generator),
        "cu_seqlens": cu_seqlens.to(torch.int32),
        "loss_mask": place_T >= 2,
        "old_logprobs": -torch.rand(sum(lengths), generator=generator) * 3,
        "advantages": torch.randn(len(lengths), generator=generator),
    }


def assert_same_metrics(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=2e-5, abs=1e-6)


def assert_same_weights(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 2e-6) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-4, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


# ------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("workers", WORLDS)
@pytest.mark.parametrize(
    ("lengths", "max_tokens"),
    [((12, 3, 7, 2, 9, 5, 14), 16384), ((12, 3, 7, 2, 9, 5, 14), 15), ((9,), 16384), ((4, 11), 11)],
    ids=["one micro-batch", "several micro-batches", "one sequence", "two sequences"],
)
def test_steps_are_those_of_one_worker(build: Build, workers: int, lengths: tuple[int, ...], max_tokens: int) -> None:
    alone, sharded = build(1), build(workers)
    batch = batch_of(lengths)
    options: dict[str, Any] = {"max_tokens_per_micro_batch": max_tokens, "max_grad_norm": 0.1}
    for _ in range(3):
        expected = alone.train_batch(batch, ppo_clip(), **options)
        assert_same_metrics(sharded.train_batch(batch, ppo_clip(), **options), expected)
    assert_same_weights(sharded.state_dict(), alone.state_dict())


@pytest.mark.parametrize("workers", WORLDS)
def test_log_probs_come_back_in_the_order_of_the_batch(build: Build, workers: int) -> None:
    alone, sharded = build(1), build(workers)
    for lengths in ((12, 3, 7, 2, 9, 5, 14), (6,)):
        batch = batch_of(lengths)
        for options in ({}, {"max_tokens_per_micro_batch": 14}, {"temperature": 0.7, "top_p": 0.8, "top_k": 5}):
            found, expected = (engine.forward_logprobs(batch, **options) for engine in (sharded, alone))  # type: ignore[arg-type]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
