"""Phases in traces, and traces in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlcore.device import Device
from rlcore.errors import InvalidInputError, StateError


@pytest.mark.covers("profiler.range", "profiler.start", "profiler.stop")
def test_a_trace_has_the_range_and_the_work_in_it(device: Device, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    device.profiler.start(path)
    with device.profiler.range("a phase of conformance"):
        torch.ones(64, device=device.torch_device).sum()
    assert device.profiler.stop() == path
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert {"a phase of conformance", "aten::sum"} <= names


@pytest.mark.covers("profiler.range")
def test_a_range_lets_errors_through_and_can_be_nested(device: Device) -> None:
    with pytest.raises(ZeroDivisionError), device.profiler.range("outer"), device.profiler.range("inner"):
        _ = 1 / 0
    with device.profiler.range("after"):
        pass


@pytest.mark.covers("profiler.start", "profiler.stop")
def test_a_wrong_order_of_calls_is_refused(device: Device, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"call profiler.start\(path\) first"):
        device.profiler.stop()
    device.profiler.start(tmp_path / "trace.json")
    try:
        with pytest.raises(StateError, match=r"call profiler.stop\(\) first"):
            device.profiler.start(tmp_path / "other.json")
    finally:
        device.profiler.stop()


@pytest.mark.covers("profiler.start")
def test_a_trace_that_cannot_be_written_is_refused_before_it_is_recorded(device: Device, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="its folder does not exist"):
        device.profiler.start(tmp_path / "absent" / "trace.json")
    with pytest.raises(InvalidInputError, match=r"\.json or \.json\.gz"):
        device.profiler.start(tmp_path / "trace.txt")
