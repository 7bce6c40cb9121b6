"""Host buffers: that they end when they are told to or forgotten, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.devices.host_memory import map_pages
from rlcore.errors import DeviceError, InvalidInputError, StateError

MB = 2**20


def address_range(buffer: Any) -> range:
    start = buffer.tensor.data_ptr()
    return range(start, start + buffer.nbytes)


def mapped_bytes(addresses: range) -> int:
    """How many of these are mapped in this process: what its other threads map meanwhile lies elsewhere."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mappings = [range(*(int(end, 16) for end in line.split()[0].split("-"))) for line in lines]
    return sum(max(0, min(m.stop, addresses.stop) - max(m.start, addresses.start)) for m in mappings)


def test_a_freed_buffer_cannot_be_used(device: Any) -> None:
    buffer = device.memory.host_alloc(100)
    device.memory.host_free(buffer)
    assert repr(buffer) == "<freed host buffer of 100 bytes>"
    with pytest.raises(StateError, match=r"^this host buffer of 100 bytes was freed; host_alloc another$"):
        _ = buffer.tensor
    with pytest.raises(StateError, match=r"^this host buffer of 100 bytes was freed; host_alloc another$"):
        device.memory.host_free(buffer)


def test_forgotten_buffers_are_given_back(device: Any) -> None:
    addresses = {address_range(device.memory.host_alloc(64 * MB)) for _ in range(8)}
    assert sum(map(mapped_bytes, addresses)) < 128 * MB


def test_a_view_outlives_a_forgotten_buffer(device: Any) -> None:
    tensor = device.memory.host_alloc(MB).tensor
    assert tensor.is_pinned() == (device.type != "cpu")
    tensor.fill_(3)
    assert tensor.to(device.torch_device).sum().item() == 3 * MB


@pytest.mark.slow
def test_leaked_buffers_end_with_the_process(device: Any, run_python: Any) -> None:
    code = (
        "import rlcore, torch\n"
        f"device = rlcore.get_device({device.name!r})\n"
        "kept = [device.memory.host_alloc(2**20) for _ in range(3)]\n"
        "view = kept[0].tensor; view.to(device.torch_device, non_blocking=True)\n"
        "print('done')"
    )
    done = run_python(code)
    assert (done.stdout, done.returncode) == ("done\n", 0)
    assert "Error" not in done.stderr and "Exception" not in done.stderr, done.stderr


def test_more_than_there_is_is_an_error() -> None:
    with pytest.raises(
        DeviceError, match=r"^1152921504606846976 bytes of host memory could not be had: .*; ask for less"
    ):
        map_pages(2**60)


def test_only_buffers_are_freed(device: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^host_free takes what host_alloc returned, got Tensor$"):
        device.memory.host_free(torch.zeros(1))
