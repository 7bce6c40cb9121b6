"""Traces in files, with the phases in them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_holds_phases_and_operators(device: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    device.profiler.start(path)
    with device.profiler.range("a phase of {braces}"):
        torch.ones(64, 64, device=device.torch_device).matmul(torch.ones(64, 64, device=device.torch_device))
    assert device.profiler.stop() == path
    data = gzip.decompress(path.read_bytes()) if name.endswith("gz") else path.read_bytes()
    events = json.loads(data)["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"a phase of {braces}", "aten::matmul"} <= names
    if device.type != "cpu":
        assert any(event.get("cat") == "kernel" for event in events)
