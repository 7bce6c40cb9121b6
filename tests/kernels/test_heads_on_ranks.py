"""Runs ranked_heads.py, once for each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("ranked_heads.py")


@pytest.mark.parametrize(
    ("device", "size"),
    [
        pytest.param("cpu", 2, marks=pytest.mark.slow),
        ("cpu", 3),
        pytest.param("cuda", 2, marks=pytest.mark.multigpu),
    ],
)
def test_operators_over_ranks(device: str, size: int, tmp_path: Path) -> None:
    world = {"WORLD_SIZE": str(size), "TEST_DEVICE": device, "TEST_STORE": str(tmp_path / "store")}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(TESTS)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [
        subprocess.Popen(command, env=os.environ | world | {"RANK": str(rank), "OMP_NUM_THREADS": "1"}, **pipes)
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(outputs)
