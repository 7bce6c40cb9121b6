"""Runs ranked_heads.py, once for each rank."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
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
    command = [sys.executable, "-m", "pytest", "-v", "-x", "-p", "no:cacheprovider", str(TESTS)]
    outputs = [tmp_path / f"rank{rank}" for rank in range(size)]
    with contextlib.ExitStack() as files:
        ranks = [
            subprocess.Popen(
                command,
                env=os.environ | world | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdout=files.enter_context(output.open("w")),
                stderr=subprocess.STDOUT,
            )
            for rank, output in enumerate(outputs)
        ]
    deadline = time.monotonic() + 240
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            if any(rank.poll() for rank in ranks):  # others would wait for it
                break
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.wait() == 0 for rank in ranks), "\n".join(output.read_text() for output in outputs)
