"""Whole programs on the simulated NPU: sampling, training and weight sync, of text and of images."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.npu_sim, pytest.mark.timeout(1200)]

EXAMPLES = Path(__file__).parents[3] / "examples"
DEEPSPEED = Path(sys.prefix) / "deepspeed"
"""Where `make test-slow` installs it, apart from what the other tests import."""
SIZES = ["--steps", "10", "--prompts", "8", "--samples", "4", "--held-out", "16"]
SIZES_OF_TEXT = ["--imitation=150", "--rate=3e-3", "--steps=4", "--problems=8", "--samples=8", "--held-out=32"]


@pytest.mark.parametrize("trainer", ["fsdp2", "deepspeed"])
def test_the_warm_start_of_the_quickstarts_task_is_learned_as_on_the_cpu(
    run_simulated: Any, tmp_path: Path, trainer: str
) -> None:
    if trainer == "deepspeed" and not DEEPSPEED.is_dir() and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed; `make test-slow` does it")
    outcomes = {}
    for device in ("npu:0", "cpu"):
        record = tmp_path / f"{device}.json"
        arguments = [*SIZES_OF_TEXT, "--trainer", trainer, "--record", str(record)]
        found = run_simulated(
            str(EXAMPLES / "algorithms" / "dr_grpo.py"), *arguments, RLCORE_DEVICE=device, PYTHONPATH=str(DEEPSPEED)
        )
        assert found.returncode == 0, found.stderr
        outcomes[device] = json.loads(record.read_text())
    npu, cpu = (outcomes[device]["rewards"] for device in ("npu:0", "cpu"))
    assert len(npu) == len(cpu) == 4
    # 150 steps add up what the devices round differently, so the rewards after them are compared as two draws of 64
    # answers, within four standard deviations.
    assert min(npu[0], cpu[0]) > 0
    assert abs(npu[0] - cpu[0]) < 4 * math.sqrt(2 * cpu[0] * (1 - cpu[0]) / 64)


_COUNT_SQUARES = """
import torch
from rlcore.examples import count_squares

def on_weights_materialized(policy):
    policy.optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, eps=1e-3)

def rewards(outputs, red, original=count_squares.rewards):
    print("answers", [answer.token_ids for output in outputs for answer in output.outputs], original(outputs, red))
    return original(outputs, red)

count_squares.Policy.on_weights_materialized, count_squares.rewards = on_weights_materialized, rewards
count_squares.main()
"""
"""The program with an optimizer that moves a weight little where its gradient is nothing but rounding. Its own moves it
as far as any other, and after ten steps log-probabilities are up to 0.004 apart: on some processor another token."""


def test_the_program_with_images_learns_as_on_the_cpu(run_simulated: Any) -> None:
    lines = {}
    for device in ("npu:0", "cpu"):
        found = run_simulated("-c", _COUNT_SQUARES, *SIZES, RLCORE_DEVICE=device, OMP_NUM_THREADS="1")
        assert found.returncode == 0, found.stderr
        lines[device] = [line for line in found.stdout.splitlines() if line.startswith(("answers", "score"))]
    # Log-probabilities are some roundings apart, about 1e-6: of 320 random numbers none lies as near to an edge.
    assert lines["npu:0"] == lines["cpu"] and len(lines["cpu"]) == 12
    assert len(set(lines["cpu"])) == 12, "each step has answers of its own"
