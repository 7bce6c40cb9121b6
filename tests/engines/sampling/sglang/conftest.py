"""Real SGLang on small random models: one engine for all tests of a file, in its own processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from rlcore.conformance.tiny_model import policy

SHAPE = {"hidden_size": 128, "intermediate_size": 256}
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu:0"
DTYPE = "bfloat16" if torch.cuda.is_available() else "float32"  # SGLang has no float32 on a GPU
ENGINE = {"dtype": DTYPE, "max_total_tokens": 2048, "timeout_s": 280}
if torch.cuda.is_available():
    ENGINE |= {"attention_backend": "triton"}  # the wheel of FlashAttention is large and may be left out

WriteModel = Callable[..., Path]


@pytest.fixture(scope="session")
def write_model(write_checkpoint: Callable[..., Path], tiny_config: dict[str, Any]) -> WriteModel:
    """``write_model("Qwen2Config", **changes)``: folder of a small random model."""
    import transformers

    def write(config: str = "Qwen2Config", *, seed: int = 0, **changes: Any) -> Path:
        return write_checkpoint(getattr(transformers, config)(**tiny_config | SHAPE | changes), seed=seed)

    return write


@pytest.fixture(scope="module")
def build_sglang(short_runtime_folder: Path) -> Iterator[Callable[..., rlcore.InferenceEngine]]:
    def build(folder: Path, **options: Any) -> rlcore.InferenceEngine:
        return rlcore.InferenceEngine(folder, executor="sglang").build(**{"devices": DEVICE} | ENGINE | options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield build


@pytest.fixture(scope="module")
def build_train() -> Callable[..., rlcore.TrainEngine]:
    def build(folder: Path, **options: Any) -> rlcore.TrainEngine:
        with rlcore.meta_device():
            module = policy(folder)
        return rlcore.TrainEngine(module).build(**{"devices": DEVICE, "dtype": DTYPE} | options)

    return build
