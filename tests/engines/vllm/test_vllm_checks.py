"""What is wrong is said before a worker starts; nothing here needs vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlcore
from rlcore.engines.executors.vllm.arguments import engine_arguments
from rlcore.errors import CheckpointError, InvalidInputError


@pytest.fixture(autouse=True)
def _no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_workers(*_: Any, **__: Any) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr("rlcore.engines.engine.start_workers", start_workers)


@pytest.mark.parametrize("executor", ["vllm", "hf"])
def test_a_wrong_model_path_is_found_at_once(
    executor: str, tmp_path: Path, write_checkpoint: Callable[..., Path], tiny_config: dict[str, Any]
) -> None:
    import transformers

    def build(path: Path) -> None:
        rlcore.InferenceEngine(path, executor=executor).build(devices="cpu:0", launcher="process")

    with pytest.raises(CheckpointError, match=r"model path '.*Qwen/Qwen3-8B' is not a folder; rlcore does not"):
        build(Path("Qwen/Qwen3-8B"))
    with pytest.raises(CheckpointError, match=r"has no config\.json, so it is not a Hugging Face model folder"):
        build(tmp_path)
    whole = write_checkpoint(transformers.Qwen2Config(**tiny_config))
    with pytest.raises(AssertionError, match="a worker was started"):
        build(whole)
    (whole / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or not safetensors"):
        build(whole)


def test_what_rlcore_sets_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInputError, match="takes no 'worker_cls' for the vllm executor: the workers are rlcore's"
    ):
        rlcore.InferenceEngine(tmp_path, executor="vllm").build(devices="cpu:0", worker_cls="mine.Worker")


def test_what_rlcore_sets_is_refused_by_a_worker_that_no_engine_checked_for() -> None:
    nothing: Any = None
    with pytest.raises(InvalidInputError, match="takes no 'model' for the vllm executor: it is the engine's path"):
        engine_arguments({"model": "another"}, ["model"], nothing, nothing)
