"""Weight syncs between a CPU and an NPU, over the simulated CANN: one group through the hosts' memory (gloo)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.npu_sim, pytest.mark.timeout(600)]

TASK = Path(__file__).with_name("sync_from_host.py")


def test_weights_go_from_cpu_to_npu_and_back(run_simulated: Any, tmp_path: Path) -> None:
    result = run_simulated(str(TASK), RLCORE_RUNTIME=str(tmp_path / "run"))
    assert result.returncode == 0, result.stdout + result.stderr
    for reports in json.loads(result.stdout.splitlines()[-1]):
        assert [report["arrived"] for report in reports] == [True] * 3
        assert {report["route"] for report in reports} == {"collective"}
        assert [report["is_delta"] for report in reports] == [False, True, False]
        assert all(report["moved_bytes"] > 0 for report in reports)
    refused = [line for line in (tmp_path / "cann.log").read_text().splitlines() if line.startswith("refused")]
    assert not refused
