"""Engines of the inference executor under test, and a trainer beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.conformance.reference import SamplerTruth
from rlcore.conformance.tiny_model import changed
from rlcore.conformance.under_test import UnderTest, mend_inference, mend_train, new_train
from rlcore.engines.sampling.model_folder import check_model_folder


@pytest.fixture(scope="session")
def under_test(pytestconfig: pytest.Config, folder: Path) -> Iterator[UnderTest]:
    found = UnderTest.of(pytestconfig, "inference", folder)
    yield found
    found.close()


@pytest.fixture
def infer(under_test: UnderTest) -> Any:
    """An engine with the folder's weights, where the executor runs by default."""
    return under_test.kept("default", under_test.inference, mend_inference)


@pytest.fixture
def apart(under_test: UnderTest) -> Any:
    """An engine whose worker has a process of its own."""
    options: dict[str, Any] = {"launcher": "process", "devices": under_test.device_name(1)}
    return under_test.kept("apart", lambda: under_test.inference(**options), mend_inference)


@pytest.fixture(scope="session")
def dtype(folder: Path) -> torch.dtype:
    """The dtype in which the folder's model is computed."""
    config = check_model_folder(folder).config
    found: torch.dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"))
    return found


@pytest.fixture
def train(under_test: UnderTest, dtype: torch.dtype) -> Any:
    """A trainer of the executor fsdp2 in this process, with the folder's weights."""
    name = str(dtype).removeprefix("torch.")
    return under_test.kept("train", lambda: new_train(under_test, launcher="inline", dtype=name), mend_train)


class Weights:
    """Weights of the folder's model, and samplers' log-probs of them."""

    def __init__(self, under_test: UnderTest, dtype: torch.dtype, own: Mapping[str, Tensor]) -> None:
        self._own, self._under_test, self._dtype = own, under_test, dtype
        self._truths: dict[int, SamplerTruth] = {}

    def of(self, seed: int) -> Mapping[str, Tensor]:
        """The folder's are those of 0."""
        return changed(self._own, seed) if seed else self._own

    def truth(self, seed: int) -> SamplerTruth:
        if seed not in self._truths:
            device = self._under_test.device.torch_device
            self._truths[seed] = SamplerTruth(self._under_test.folder, self.of(seed), self._dtype, device)
        return self._truths[seed]


@pytest.fixture(scope="session")
def weights(under_test: UnderTest, dtype: torch.dtype, folder: Path) -> Weights:
    from safetensors.torch import load_file

    own = {name: tensor for file in check_model_folder(folder).weight_files for name, tensor in load_file(file).items()}
    return Weights(under_test, dtype, own)


@pytest.fixture
def truth(weights: Weights) -> SamplerTruth:
    """The sampler that the folder's weights stand for."""
    return weights.truth(0)


@pytest.fixture(scope="session")
def vocab_size(folder: Path) -> int:
    return check_model_folder(folder).vocab_size


@pytest.fixture(scope="session")
def prompts(vocab_size: int) -> list[list[int]]:
    """Prompts of different lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in (3, 11, 1, 6)]
