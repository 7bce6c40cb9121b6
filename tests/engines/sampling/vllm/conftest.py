"""Real vLLM on small random models: one engine for all tests of a file, in its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore

from .policy import trainer

# vLLM's CPU build has no attention kernel for smaller heads than 32.
SHAPE = {"hidden_size": 128, "intermediate_size": 256}
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 1 << 24,
    "timeout_s": 280,
}
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu:0"

WriteModel = Callable[..., Path]


@pytest.fixture(scope="session")
def write_model(write_checkpoint: Callable[..., Path], tiny_config: dict[str, Any]) -> WriteModel:
    """``write_model("Qwen2Config", **changes)``: folder of a small random model that vLLM runs on a CPU."""
    import transformers

    def write(config: str = "Qwen2Config", *, seed: int = 0, **changes: Any) -> Path:
        return write_checkpoint(getattr(transformers, config)(**tiny_config | SHAPE | changes), seed=seed)

    return write


@pytest.fixture(scope="session")
def model_folder(write_model: WriteModel) -> Path:
    return write_model()


@pytest.fixture(autouse=True)
def _runtime(_no_settings_from_outside: None, short_runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
    monkeypatch.setenv("RLCORE_CACHE", str(short_runtime_folder / "cache"))


@pytest.fixture(scope="session")
def _quick(short_runtime_folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
        patch.setenv("RLCORE_CACHE", str(short_runtime_folder / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TORCH_COMPILE_DISABLE", "1")  # vLLM compiles a part of its sampler: longer than a test
        yield


@pytest.fixture(scope="module")
def infer(_quick: None, model_folder: Path) -> Iterator[rlcore.InferenceEngine]:
    with rlcore.InferenceEngine(model_folder, executor="vllm") as engine:
        yield engine.build(devices=DEVICE, **ENGINE)


@pytest.fixture(scope="module")
def hf(_quick: None, model_folder: Path) -> Iterator[rlcore.InferenceEngine]:
    with rlcore.InferenceEngine(model_folder) as engine:
        yield engine.build(devices=DEVICE, dtype="float32", launcher="inline")


@pytest.fixture(scope="module")
def build_vllm(_quick: None) -> Callable[..., rlcore.InferenceEngine]:
    def build(folder: Path, **options: Any) -> rlcore.InferenceEngine:
        return rlcore.InferenceEngine(folder, executor="vllm").build(**{"devices": DEVICE} | ENGINE | options)

    return build


@pytest.fixture(scope="module")
def build_train(_quick: None) -> Callable[..., rlcore.TrainEngine]:
    def build(folder: Path, **options: Any) -> rlcore.TrainEngine:
        return trainer(folder, **{"devices": DEVICE} | options)

    return build


@pytest.fixture(scope="module")
def train(build_train: Callable[..., rlcore.TrainEngine], model_folder: Path) -> Iterator[rlcore.TrainEngine]:
    with build_train(model_folder) as engine:
        yield engine
