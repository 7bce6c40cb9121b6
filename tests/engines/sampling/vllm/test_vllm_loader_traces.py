"""Traces of real vLLM loaders, each plan tested on a real instance: with tensor and expert parallel workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1000)]  # on two busy cores

SCRIPT = Path(__file__).with_name("trace_models.py")
PLACES = ("tp 1", "tp 2, first", "tp 2, second")
DENSE = ("qwen2", "qwen2 tied", "qwen3", "llama", "mistral", "gemma2", "gemma3", "glm4", "phi3")
WHOLE = ("qwen3_moe", "mixtral", *DENSE, "gpt_oss")
CHANGED = {"mamba2": "mixer.A", "jamba": "mamba.A"}
"""They keep -exp(A_log)."""

Found = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    command = [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("models"))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    return {(line["model"], line["place"]): line for line in lines}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("model", WHOLE)
def test_nothing_falls_back(found: Found, model: str, place: str) -> None:
    one = found[model, place]
    assert "error" not in one, one
    assert one["refusal"] == ""
    assert (one["not_plain"], one["fallback_bytes"], one["failures"], one["wrong"]) == ({}, 0, [], {})
    assert one["untouched_parameters"] == []
    assert one["pieces"] >= one["names"] - 2  # the biases that only the first rank adds are constants elsewhere


@pytest.mark.parametrize("place", ["ep 2, first", "ep 2, second"])
def test_experts_of_other_workers_are_not_read(found: Found, place: str) -> None:
    one = found["qwen3_moe", place]
    assert (one["fallback_bytes"], one["wrong"]) == (0, {})
    assert one["idle"] == 2 * 4 * 3  # layers, experts, matrices
    assert one["pieces"] == one["names"] - one["idle"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("model", CHANGED)
def test_what_a_loader_changes_falls_back_with_the_reason(found: Found, model: str, place: str) -> None:
    one = found[model, place]
    assert one["refusal"] == ""
    assert one["not_plain"] and all(name.endswith(CHANGED[model]) for name in one["not_plain"])
    assert set(one["not_plain"].values()) == {"aten.neg.default made it"}
    assert 0 < one["fallback_bytes"] < 0.02 * one["needed_bytes"] * 2
    assert one["wrong"] == {}
