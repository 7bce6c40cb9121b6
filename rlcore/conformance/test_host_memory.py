"""Host memory to copy from and to, and many copies in one call."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.conformance.bits import any_bits, same_bits
from rlcore.conformance.work import MB, BusyWork, grown
from rlcore.device import Device
from rlcore.errors import InvalidInputError, StateError


@pytest.mark.covers("memory.host_alloc", "memory.host_free")
@pytest.mark.parametrize("nbytes", [1, 4097, 3 * MB + 5])  # smallest, one past a page, no round number
def test_a_host_buffer_has_exactly_its_size_and_travels_there_and_back(device: Device, nbytes: int) -> None:
    buffer = device.memory.host_alloc(nbytes)
    assert buffer.nbytes == nbytes
    assert buffer.is_pinned == device.memory.can_pin
    host = buffer.tensor
    assert (host.dtype, tuple(host.shape), host.device.type) == (torch.uint8, (nbytes,), "cpu")
    host.copy_(torch.arange(nbytes) % 251)
    there = torch.empty_like(host, device=device.torch_device).copy_(host, non_blocking=True)
    host.copy_(there + 1, non_blocking=True)
    device.synchronize()
    if not device.spec.is_host:  # torch asks no device that it has not used
        assert host.is_pinned() == buffer.is_pinned
    assert torch.equal(host, (torch.arange(nbytes) % 251 + 1).to(torch.uint8))
    del host
    device.memory.host_free(buffer)


@pytest.mark.covers("memory.host_alloc")
def test_two_host_buffers_share_no_memory(device: Device) -> None:
    buffers = [device.memory.host_alloc(4097) for _ in range(2)]
    for number, buffer in enumerate(buffers, 1):
        buffer.tensor.fill_(number)
    assert [buffer.tensor.unique().tolist() for buffer in buffers] == [[1], [2]]
    for buffer in buffers:
        device.memory.host_free(buffer)


@pytest.mark.covers("memory.host_alloc")
def test_a_host_buffer_begins_at_a_page_and_is_pinned_to_its_end(device: Device) -> None:
    buffer = device.memory.host_alloc(MB + 1)
    host = buffer.tensor
    assert host.data_ptr() % mmap.PAGESIZE == 0
    if buffer.is_pinned:
        torch.ones(1, device=device.torch_device)  # torch asks no device that it has not used
        torchs_own = torch.empty(MB + 1, dtype=torch.uint8, pin_memory=True)
        if _is_pinned_from(torchs_own, MB):  # some know a pinned block by its first byte alone
            assert _is_pinned_from(host, MB // 2) and _is_pinned_from(host, MB)
    del host
    device.memory.host_free(buffer)


@pytest.mark.covers("memory.host_alloc")
def test_the_pages_of_a_host_buffer_are_present(device: Device) -> None:
    """The kernel brings an absent page at its first use, by a fault; a huge page has 2 MiB."""
    faults = [_faults_of_first_use(device, 32 * MB) for _ in range(3)]
    assert min(faults) < 32 // 2 // 2, f"the kernel had to bring pages {faults} times"


@pytest.mark.covers("memory.host_alloc", "memory.host_free")
def test_freed_host_buffers_leave_no_memory_behind(device: Device) -> None:
    nbytes, cycles, spans = 8 * MB, 4, 3
    states, leaked = list[dict[str, int]](), {"?"}
    while leaked and len(states) <= spans:
        for _ in range(cycles):
            device.memory.host_free(device.memory.host_alloc(nbytes))
        states.append({"mapped bytes": int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE})
        leaked = grown(states, {"mapped bytes": nbytes * cycles // 2}) if len(states) > 1 else {"?"}
    assert not leaked, states


@pytest.mark.covers("memory.host_free")
def test_a_host_buffer_is_freed_once_and_not_while_a_tensor_looks_at_it(device: Device) -> None:
    buffer = device.memory.host_alloc(4096)
    tensor = buffer.tensor
    with pytest.raises(StateError, match="cannot be freed while a tensor looks at it"):
        device.memory.host_free(buffer)
    tensor.fill_(1)
    del tensor
    device.memory.host_free(buffer)
    for use in (lambda: device.memory.host_free(buffer), lambda: buffer.tensor):
        with pytest.raises(StateError, match="was freed"):
            use()


@pytest.mark.covers("memory.host_free")
def test_a_host_buffer_waits_for_the_copies_that_use_it(device: Device) -> None:
    busy = BusyWork.of(device)
    buffer = device.memory.host_alloc(MB)
    buffer.tensor.fill_(7)
    there = torch.zeros(MB, dtype=torch.uint8, device=device.torch_device)
    busy.queue()
    there.copy_(buffer.tensor, non_blocking=True)
    device.memory.host_free(buffer)
    assert there.min().item() == 7


@pytest.mark.covers("memory.host_alloc")
@pytest.mark.parametrize("nbytes", [0, -1, 1.5, "1", True])
def test_a_size_that_is_none_is_refused(device: Device, nbytes: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"at least 1 byte, got {nbytes!r}"):
        device.memory.host_alloc(nbytes)


@pytest.mark.covers("memory.copy_batch")
def test_a_batch_copies_every_pair_whatever_its_direction_dtype_and_strides(device: Device) -> None:
    """Bits are compared: a number that went through another dtype, or a NaN that was set right, has others."""
    host = [any_bits(number % 300 + 1, _DTYPES[number % len(_DTYPES)]) for number in range(1300)]
    there = [torch.zeros_like(tensor, device=device.torch_device) for tensor in host]
    device.memory.copy_batch(there, host)
    beside = [torch.zeros_like(tensor) for tensor in there]
    device.memory.copy_batch(beside, there)
    back = [torch.zeros_like(tensor) for tensor in host]
    device.memory.copy_batch(back, beside)
    device.synchronize()
    wrong = [number for number, pair in enumerate(zip(back, host, strict=True)) if not same_bits(*pair)]
    assert not wrong, f"{len(wrong)} of {len(host)} pairs, the first is number {wrong[0]}, of {host[wrong[0]].dtype}"


@pytest.mark.covers("memory.copy_batch")
def test_a_batch_copies_a_large_tensor_to_its_last_byte(device: Device) -> None:
    host = any_bits(33 * MB + 5, torch.uint8) | 1  # no byte is the 0 that a forgotten copy leaves
    there = torch.zeros_like(host, device=device.torch_device)
    beside, back = torch.zeros_like(there), torch.zeros_like(host)
    for target, source in ((there, host), (beside, there), (back, beside)):
        device.memory.copy_batch([target], [source])
    device.synchronize()
    wrong = (back != host).nonzero()
    assert not len(wrong), f"{len(wrong)} of {len(host)} bytes, the first is number {int(wrong[0])}"


@pytest.mark.covers("memory.copy_batch")
def test_a_batch_of_strided_tensors(device: Device) -> None:
    source = torch.arange(96.0, device=device.torch_device).view(8, 12)
    target = torch.zeros(12, 8, device=device.torch_device)
    device.memory.copy_batch([target.t()[::2], target.t()[1::2]], [source[::2], source[1::2]])
    assert torch.equal(target.t().cpu(), source.cpu())


@pytest.mark.covers("memory.copy_batch")
def test_a_batch_is_queued_on_the_stream_it_is_given(device: Device) -> None:
    busy, stream = BusyWork.of(device), device.streams.new()
    source = torch.zeros(MB, device=device.torch_device)
    target = torch.zeros_like(source)
    device.synchronize()
    with device.streams.use(stream):
        busy.queue()
        source.fill_(5)
    device.memory.copy_batch([target], [source], stream=stream)
    stream.synchronize()
    assert target.min().item() == 5


@pytest.mark.covers("memory.copy_batch")
def test_pairs_that_differ_or_overlap_are_refused(device: Device) -> None:
    values = torch.zeros(8, device=device.torch_device)
    for dst, src, message in (
        ([values], [], "a source for each destination, got 1 and 0"),
        ([values], [values[:4].clone()], r"pairs of equal shape and dtype, got float32 \[8\] from float32 \[4\]"),
        ([values], [values.bfloat16()], r"float32 \[8\] from bfloat16 \[8\] as pair 0"),
        ([values[:6], values[2:]], [torch.ones(6), torch.ones(6)], "destinations that do not overlap"),
        ([values[:4]], [values[2:6]], "sources that no destination overlaps"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            device.memory.copy_batch(dst, src)
    device.memory.copy_batch([], [])


_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float16, torch.bool)


def _is_pinned_from(host: torch.Tensor, place: int) -> bool:
    return torch.from_numpy(host.numpy()[place:]).is_pinned()  # of a view torch asks for the base


def _faults_of_first_use(device: Device, nbytes: int) -> int:
    buffer = device.memory.host_alloc(nbytes)
    pages = buffer.tensor.numpy()[:: mmap.PAGESIZE]
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    pages[:] = 1
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    del pages
    device.memory.host_free(buffer)
    return faults
