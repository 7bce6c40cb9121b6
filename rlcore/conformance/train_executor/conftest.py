"""Engines of the train executor under test, and a sampler beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.conformance.reference import SamplerTruth, TrainerTruth
from rlcore.conformance.tiny_model import policy
from rlcore.conformance.under_test import UnderTest, mend_inference, mend_train, new_train
from rlcore.engines.sampling.model_folder import check_model_folder

Batch = dict[str, Tensor]


@pytest.fixture(scope="session")
def under_test(pytestconfig: pytest.Config, folder: Path) -> Iterator[UnderTest]:
    found = UnderTest.of(pytestconfig, "train", folder)
    yield found
    found.close()


@pytest.fixture
def train_on(under_test: UnderTest) -> Callable[[int], Any]:
    """``train_on(workers)``: an engine with the folder's weights, sharded over so many."""

    def get(workers: int) -> Any:
        options: dict[str, Any] = {"devices": under_test.device_names(workers), "data_parallel_size": workers}
        return under_test.kept(str(workers), lambda: new_train(under_test, **options), mend_train)

    return get


@pytest.fixture
def train(train_on: Callable[[int], Any]) -> Any:
    """An engine of one worker, where the executor runs by default."""
    return train_on(1)


@pytest.fixture
def apart(under_test: UnderTest) -> Any:
    """An engine whose worker has a process of its own."""
    options: dict[str, Any] = {"launcher": "process", "devices": under_test.device_name(1)}
    return under_test.kept("apart", lambda: new_train(under_test, **options), mend_train)


@pytest.fixture
def infer(under_test: UnderTest) -> Any:
    """A sampler of the executor hf, in this process."""
    return under_test.kept("infer", lambda: under_test.inference(launcher="inline", dtype="float32"), mend_inference)


@pytest.fixture
def truth(train: Any, folder: Path) -> TrainerTruth:
    """The steps of a trainer that begins with the folder's weights."""
    return TrainerTruth(lambda: policy(folder), train.initial)


@pytest.fixture
def sampler_truth(under_test: UnderTest, folder: Path) -> Callable[..., SamplerTruth]:
    """``sampler_truth(weights)``, of float32."""
    return lambda weights: SamplerTruth(folder, weights, torch.float32, under_test.device.torch_device)


@pytest.fixture(scope="session")
def make_batch(folder: Path) -> Callable[..., Batch]:
    """``make_batch(lengths, seed)``: sequences of these lengths, padded; their first tokens are a prompt."""
    vocab_size = check_model_folder(folder).vocab_size

    def make(lengths: tuple[int, ...] = (12, 3, 7, 2, 9, 14), seed: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        place_L = torch.arange(max(lengths))
        mask_NL = place_L < torch.tensor(lengths)[:, None]
        return {
            "input_ids": torch.randint(vocab_size, mask_NL.shape, generator=generator),
            "attention_mask": mask_NL,
            "loss_mask": mask_NL & (place_L >= 2),
            "old_logprobs": -torch.rand(mask_NL.shape, generator=generator) * 3,
            "advantages": torch.randn(len(lengths), generator=generator),
        }

    return make


@pytest.fixture(scope="session")
def batch(make_batch: Callable[..., Batch]) -> Batch:
    return make_batch()


def surrogate(logprob: Tensor, entropy: Tensor, per_token: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss function without a clip, beside whose edge a rounding may put a token on either side."""
    value = -logprob * per_token["advantages"] + 0.1 * (logprob - per_token["old_logprobs"]).square() - 0.02 * entropy
    return value, {"logprob_mean": logprob}


@pytest.fixture(scope="session")
def loss_fn() -> Any:
    return surrogate
