"""Large models that compute in float32 on an accelerator because nobody has said otherwise."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2ForCausalLM

import rlcore
from rlcore.engines.fsdp2.executor import float32_warning
from rlcore.engines.fsdp2.sharding import Sharding

from .train_policy import adamw_policy

ACCELERATOR: Any = SimpleNamespace(name="cuda:0", spec=SimpleNamespace(is_host=False))
HOST: Any = SimpleNamespace(name="cpu:0", spec=SimpleNamespace(is_host=True))
LARGE, SMALL = nn.Linear(10_000, 10_000, device="meta"), nn.Linear(9_999, 10_000, device="meta", bias=False)


def test_it_says_what_to_build_with() -> None:
    warning = float32_warning(LARGE, Sharding(), ACCELERATOR)
    assert warning is not None
    assert warning.startswith("Linear computes in float32 on cuda:0;")
    assert "Build with compute_dtype='bfloat16'" in warning and "compute_dtype='float32'" in warning


@pytest.mark.parametrize(
    ("module", "options", "device"),
    [
        (LARGE, {}, HOST),
        (SMALL, {}, ACCELERATOR),
        (LARGE, {"compute_dtype": "bfloat16"}, ACCELERATOR),
        (LARGE, {"compute_dtype": "float32"}, ACCELERATOR),
        (LARGE, {"dtype": "bfloat16"}, ACCELERATOR),
    ],
)
def test_it_is_silent_elsewhere(module: nn.Module, options: dict[str, str], device: Any) -> None:
    assert float32_warning(module, Sharding(**options), device) is None


def test_it_is_silent_where_products_are_of_tensorfloat32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert float32_warning(LARGE, Sharding(), ACCELERATOR) is None


def test_the_worker_logs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, qwen2_folder: Path
) -> None:
    monkeypatch.setattr("rlcore.engines.fsdp2.executor.float32_warning", lambda *_: "it is slow")
    with rlcore.meta_device():
        module = adamw_policy(Qwen2ForCausalLM).from_pretrained(qwen2_folder)
    with rlcore.TrainEngine(module).build(devices="cpu"):
        assert "it is slow" in caplog.text
