"""Runs ranked_heads.py and ranked_logits.py, once for each rank."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm import LIMIT_S, TorchPopen

LAUNCHER = Path(__file__).with_name("fork_ranks.py")
TESTS = [str(LAUNCHER.with_name(name)) for name in ("ranked_heads.py", "ranked_logits.py")]


@pytest.mark.parametrize(
    ("device", "size"),
    [
        pytest.param("cpu", 3, marks=pytest.mark.slow),
        pytest.param("cpu", 2, marks=pytest.mark.slow),
        pytest.param("cuda", 2, marks=pytest.mark.multigpu),
    ],
)
def test_operators_over_ranks(device: str, size: int, tmp_path: Path) -> None:
    ranks = TorchPopen(
        [sys.executable, str(LAUNCHER), str(size), str(tmp_path), *TESTS],
        env=os.environ | {"TEST_DEVICE": device, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = ranks.communicate(timeout=LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
    outputs = [output.read_text("utf-8") for output in sorted(tmp_path.glob("rank?"))]
    assert ranks.returncode == 0, "\n".join([said, *outputs])
    assert len(outputs) == size and all(" passed" in output for output in outputs)
