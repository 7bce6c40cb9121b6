"""The CPU and GPUs say of themselves more than the conformance suite asks of every device."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from rlcore.errors import UnsupportedError
from rlcore.registry import get_device


def test_a_device_is_shown_with_its_vendor_and_name(device: Any) -> None:
    assert repr(device) == f"<{device.vendor} device {device.spec.name}:0>"


def test_properties_are_those_of_the_machine(device: Any) -> None:
    found = device.properties()
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", found.uuid)
    assert found.capability
    assert found.cores >= 1


def test_pinned_host_memory_is_offered_where_it_helps(device: Any) -> None:
    assert device.memory.can_pin == (device.type != "cpu")
    if device.memory.can_pin:
        assert torch.empty(1, dtype=torch.uint8, pin_memory=True).is_pinned()


@pytest.mark.parametrize(("member", "file"), [("info", "meminfo"), ("stats", "self/status")])
def test_cpu_without_proc_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, member: str, file: str) -> None:
    memory = get_device("cpu").memory
    monkeypatch.setattr("pathlib.Path.exists", lambda path: False)
    text = rf"^reading memory figures of the cpu device is not supported: they are read from /proc/{file} of Linux$"
    with pytest.raises(UnsupportedError, match=text):
        getattr(memory, member)()
