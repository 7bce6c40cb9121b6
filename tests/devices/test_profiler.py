"""Traces in files, with the phases in them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.errors import InvalidInputError, StateError


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


def test_one_trace_at_a_time(device: Any, tmp_path: Path) -> None:
    device.profiler.start(tmp_path / "one.json")
    with pytest.raises(StateError, match=r"^a trace to .*one.json is being recorded; call profiler.stop\(\) first$"):
        device.profiler.start(tmp_path / "two.json")
    device.profiler.stop()
    with pytest.raises(StateError, match=r"^no trace is being recorded; call profiler.start\(path\) first$"):
        device.profiler.stop()


def test_a_trace_that_could_not_be_written_is_refused_before_it_starts(device: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"^a trace is written to a .json or .json.gz file, got '.*trace.txt'$"):
        device.profiler.start(tmp_path / "trace.txt")
    with pytest.raises(InvalidInputError, match=r"its folder does not exist$"):
        device.profiler.start(tmp_path / "missing" / "trace.json")
    with pytest.raises(StateError):
        device.profiler.stop()


def test_a_phase_that_fails_is_closed(device: Any) -> None:
    with pytest.raises(ZeroDivisionError), device.profiler.range("fails"):
        _ = 1 / 0
