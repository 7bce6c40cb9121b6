"""Whole programs on the simulated NPU: images, sampling, training and weight sync give what they give on the CPU."""

from __future__ import annotations

import importlib.util
import json
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
def test_the_task_of_the_quickstart_is_learned_as_on_the_cpu(run_simulated: Any, tmp_path: Path, trainer: str) -> None:
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
    # The simulation computes by the CPU's kernels; a token would differ where a rounding crosses a random number.
    assert outcomes["npu:0"] == outcomes["cpu"]
    assert len({*outcomes["cpu"]["rewards"]}) > 2, outcomes


def test_the_program_with_images_learns_as_on_the_cpu(run_simulated: Any) -> None:
    lines = {}
    for device in ("npu:0", "cpu"):
        found = run_simulated(str(EXAMPLES / "count_squares.py"), *SIZES, RLCORE_DEVICE=device, OMP_NUM_THREADS="1")
        assert found.returncode == 0, found.stderr
        lines[device] = [line for line in found.stdout.splitlines() if "score" in line or "reward" in line]
    # The simulation computes by the CPU's kernels; a token would differ where a rounding crosses a random number.
    assert lines["npu:0"] == lines["cpu"] and len(lines["cpu"]) == 3
