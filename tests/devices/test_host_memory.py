"""Host buffers: their size, that they are pinned where that helps, and that they end when they are told to."""

from __future__ import annotations

import gc
import mmap
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


def test_a_buffer_has_exactly_the_bytes_asked_for(device: Any) -> None:
    for nbytes in (1, mmap.PAGESIZE, 3 * MB + 1):
        buffer = device.memory.host_alloc(nbytes)
        tensor = buffer.tensor
        assert (tensor.dtype, tensor.shape, tensor.device.type) == (torch.uint8, (nbytes,), "cpu")
        assert tensor.data_ptr() % mmap.PAGESIZE == 0
        assert buffer.nbytes == nbytes
        assert buffer.is_pinned == tensor.is_pinned() == (device.type != "cpu")
        tensor.fill_(7)
        assert buffer.tensor[-1].item() == 7
        del tensor
        device.memory.host_free(buffer)


def test_all_of_a_buffer_is_there_before_it_is_used(device: Any) -> None:
    """What is not resident would be found missing, slowly or never, in the first copy."""
    device.memory.host_free(device.memory.host_alloc(1))
    gc.collect()  # what earlier tests left would be freed meanwhile
    before = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    buffer = device.memory.host_alloc(64 * MB + 5)
    after = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    assert abs(after - before - 64 * MB) < 16 * MB
    device.memory.host_free(buffer)


def test_free_gives_the_memory_back(device: Any) -> None:
    buffer = device.memory.host_alloc(256 * MB)
    addresses = address_range(buffer)
    assert mapped_bytes(addresses) == 256 * MB
    device.memory.host_free(buffer)
    assert mapped_bytes(addresses) < 128 * MB  # a thread that begins may have its 72 MiB there now


def test_a_freed_buffer_cannot_be_used(device: Any) -> None:
    buffer = device.memory.host_alloc(100)
    device.memory.host_free(buffer)
    assert repr(buffer) == "<freed host buffer of 100 bytes>"
    with pytest.raises(StateError, match=r"^this host buffer of 100 bytes was freed; host_alloc another$"):
        _ = buffer.tensor
    with pytest.raises(StateError, match=r"^this host buffer of 100 bytes was freed; host_alloc another$"):
        device.memory.host_free(buffer)


def test_a_buffer_in_use_cannot_be_freed(device: Any) -> None:
    buffer = device.memory.host_alloc(MB)
    view = buffer.tensor[10:].view(torch.int16)
    with pytest.raises(StateError, match=r"^a host buffer of 1048576 bytes cannot be freed while a tensor looks at it"):
        device.memory.host_free(buffer)
    view.fill_(5)
    assert buffer.tensor.is_pinned() == buffer.is_pinned
    del view
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


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, "1", True])
def test_a_size_that_is_none_is_refused(device: Any, nbytes: Any) -> None:
    with pytest.raises(
        InvalidInputError, match=rf"^host_alloc takes a whole number of at least 1 byte, got {nbytes!r}$"
    ):
        device.memory.host_alloc(nbytes)


def test_more_than_there_is_is_an_error() -> None:
    with pytest.raises(
        DeviceError, match=r"^1152921504606846976 bytes of host memory could not be had: .*; ask for less"
    ):
        map_pages(2**60)


def test_only_buffers_are_freed(device: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^host_free takes what host_alloc returned, got Tensor$"):
        device.memory.host_free(torch.zeros(1))
