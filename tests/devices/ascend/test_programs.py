"""A whole program on the simulated NPU: images, sampling, training and weight sync give what they give on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.npu_sim, pytest.mark.timeout(1200)]

PROGRAM = Path(__file__).parents[3] / "examples" / "count_squares.py"
SIZES = ["--steps", "10", "--prompts", "8", "--samples", "4", "--held-out", "16"]


def test_the_program_with_images_learns_as_on_the_cpu(run_simulated: Any) -> None:
    lines = {}
    for device in ("npu:0", "cpu"):
        found = run_simulated(str(PROGRAM), *SIZES, RLCORE_DEVICE=device, OMP_NUM_THREADS="1")
        assert found.returncode == 0, found.stderr
        lines[device] = [line for line in found.stdout.splitlines() if "score" in line or "reward" in line]
    # The simulation computes by the CPU's kernels; a token would differ where a rounding crosses a random number.
    assert lines["npu:0"] == lines["cpu"] and len(lines["cpu"]) == 3
