"""Weights between a third party's device and the host: one group of hosts, whatever the devices are."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import ROOT
from tests.warm import LIMIT_S


def started(python: Path, which: str, **wanted: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, "-m", "tests.engines.weight_sync.far_ends", which, json.dumps(wanted)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_weights_go_from_the_host_to_another_kind_of_device_whole_and_as_changes(simdev_python: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        common = {"address": f"tcp://127.0.0.1:{probe.getsockname()[1]}", "num_elements": 100_000}
    rounds = [{"delta": True, "timeout_s": 100, "staging_bytes": 65536}] * 3
    ends = [
        started(simdev_python, "sender", **common, rounds=rounds),
        started(simdev_python, "receiver", **common, device="simdev"),
    ]
    found = []
    for one in ends:
        out, error = one.communicate(timeout=LIMIT_S)
        assert one.returncode == 0, error
        found.append([json.loads(line) for line in out.splitlines()])
    sent, received = found
    assert [one["digest"] for one in received[:3]] == [one["digest"] for one in sent]
    assert [(one["route"], one["is_delta"]) for one in sent] == [
        ("collective", False),
        ("collective", True),
        ("collective", True),
    ]
