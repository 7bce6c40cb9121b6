"""The quickstart with a real engine of another project as its sampler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.model_rounding import logprob_rounding


@pytest.mark.slow
@pytest.mark.parametrize(
    "executor", [pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)]
)
@pytest.mark.timeout(900)
def test_it_samples_what_the_trainer_says(executor: str, tmp_path: Path) -> None:
    pytest.importorskip(
        "matplotlib", reason="needs matplotlib, which draws its picture: pip install 'rlcore[quickstart]'"
    )
    command = [sys.executable, "-m", "rlcore", "quickstart", "--executor", executor, "--steps", "3", "--output", "run"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=880, check=False)
    assert result.returncode == 0, result.stderr
    assert f"starting the sampler, {executor}" in result.stderr
    *_, first, second, third = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    for metrics in (first, second, third):
        if executor != "sglang" or not torch.cuda.is_available():  # which samples in bfloat16 there
            assert metrics["parity"] < logprob_rounding(tmp_path / "run" / "model", num_tokens=32)
        assert 0 < metrics["reward"] < 1
        assert metrics["offload_s"] < 3  # a cache of all the memory would take longer, each step
