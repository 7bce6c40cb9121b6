"""That the books of memory are true: they follow what is allocated, freed, remembered and given back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlcore.conformance.memory_tasks import allocated
from rlcore.conformance.peer import Peer
from rlcore.conformance.work import MB, filled
from rlcore.device import Device
from rlcore.errors import InvalidInputError
from rlcore.registry import get_device

NUM_BYTES = 128 * MB
SLACK = 16 * MB
"""The bytes by which an allocator rounds up, and which the interpreter moves where the books are the process's own."""
HOLD = "rlcore.conformance.memory_tasks:hold"


@pytest.fixture(autouse=True)
def _warm(device: Device) -> None:
    filled(device, 1)  # the first tensor makes the context
    device.synchronize()
    device.memory.empty_cache()


@pytest.mark.covers("memory.stats")
def test_allocated_and_reserved_bytes_follow_a_tensor(device: Device) -> None:
    before = allocated(device)
    tensor = filled(device, NUM_BYTES)
    assert allocated(device) - before == pytest.approx(NUM_BYTES, abs=SLACK)
    stats = device.memory.stats()
    assert stats.reserved_bytes >= stats.allocated_bytes
    del tensor
    device.synchronize()
    device.memory.empty_cache()
    assert allocated(device) - before == pytest.approx(0, abs=SLACK)


@pytest.mark.covers("memory.stats")
def test_each_of_several_tensors_counts(device: Device) -> None:
    before = allocated(device)
    tensors = [filled(device, NUM_BYTES // 4) for _ in range(4)]
    for left in range(4, 0, -1):
        assert allocated(device) - before == pytest.approx(left * NUM_BYTES // 4, abs=SLACK)
        tensors.pop()
        device.memory.empty_cache()


@pytest.mark.covers("memory.stats")
def test_freed_memory_that_the_allocator_keeps_is_not_allocated(device: Device) -> None:
    if device.spec.is_host:
        pytest.skip("the books of host memory are the process's, where what the C library keeps counts")
    before = allocated(device)
    tensor = filled(device, NUM_BYTES)
    del tensor
    assert allocated(device) - before == pytest.approx(0, abs=SLACK)


@pytest.mark.covers("memory.stats", "memory.reset_peak")
def test_the_peak_remembers_what_was_freed_until_it_is_reset(device: Device) -> None:
    device.memory.reset_peak()
    before = device.memory.stats().peak_allocated_bytes
    filled(device, NUM_BYTES)
    device.synchronize()
    device.memory.empty_cache()
    assert device.memory.stats().peak_allocated_bytes - before == pytest.approx(NUM_BYTES, abs=SLACK)
    device.memory.reset_peak()
    assert device.memory.stats().peak_allocated_bytes - before == pytest.approx(0, abs=SLACK)


@pytest.mark.covers("memory.stats", "memory.reset_peak")
def test_a_reset_peak_is_what_is_there(device: Device) -> None:
    tensor = filled(device, NUM_BYTES)
    device.synchronize()
    device.memory.reset_peak()
    stats = device.memory.stats()
    assert stats.peak_allocated_bytes == pytest.approx(stats.allocated_bytes, abs=SLACK)
    assert stats.allocated_bytes >= tensor.nbytes


@pytest.mark.covers("memory.stats")
def test_statistics_are_of_this_device_alone(device: Device) -> None:
    if device.spec.is_host or device.count() == 1:
        pytest.skip(f"{device.spec.name} has one memory here")
    other = get_device(f"{device.spec.name}:{(device.index + 1) % device.count()}")
    before = other.memory.stats()
    tensor = filled(device, NUM_BYTES)
    assert other.memory.stats() == before
    del tensor
    device.memory.empty_cache()


@pytest.mark.covers("memory.empty_cache", "memory.stats")
def test_empty_cache_gives_freed_memory_back_and_keeps_what_is_used(device: Device) -> None:
    before = device.memory.stats().reserved_bytes
    tensors = [filled(device, MB // 16) for _ in range(NUM_BYTES // (MB // 16))]
    last = tensors[-1]  # an allocator keeps what was freed below it
    tensors.clear()
    assert device.memory.stats().reserved_bytes - before > NUM_BYTES / 2
    device.memory.empty_cache()
    assert device.memory.stats().reserved_bytes - before == pytest.approx(0, abs=SLACK)
    assert last.sum().item() == MB // 16


@pytest.mark.covers("memory.info")
def test_info_is_of_a_device_with_room(device: Device) -> None:
    info = device.memory.info()
    assert 0 < info.free_bytes <= info.total_bytes
    assert device.memory.stats().allocated_bytes <= info.total_bytes


@pytest.mark.covers("memory.info")
def test_free_bytes_fall_when_another_process_takes_memory(device: Device, request: pytest.FixtureRequest) -> None:
    if device.spec.is_host:
        pytest.skip("the kernel keeps freed pages back for each processor, and does not count them as free at once")
    peer: Peer = request.getfixturevalue("peer")
    peer.ask(HOLD, 1)
    falls = []
    for _ in range(5):  # others may use the device too
        before = device.memory.info().free_bytes
        peer.ask(HOLD, NUM_BYTES)
        falls.append(before - device.memory.info().free_bytes)
        peer.ask(HOLD, 1)
        if abs(falls[-1] - NUM_BYTES) < NUM_BYTES / 2:
            return
    pytest.fail(f"another process took {NUM_BYTES} bytes, but free_bytes fell by {falls}")


@pytest.mark.covers("memory.stats")
def test_too_large_an_allocation_is_an_out_of_memory_error_that_one_recovers_from(device: Device) -> None:
    if device.spec.is_host:
        pytest.skip("the host may promise memory that it does not have")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * device.memory.info().total_bytes, dtype=torch.uint8, device=device.torch_device)
    assert filled(device, MB).sum().item() == MB


@pytest.mark.covers("memory.stats")
def test_a_storage_can_give_up_its_memory_in_place_and_get_new(device: Device) -> None:
    tensor = filled(device, NUM_BYTES)
    before = allocated(device)
    tensor.untyped_storage().resize_(0)
    device.memory.empty_cache()
    assert before - allocated(device) == pytest.approx(NUM_BYTES, abs=SLACK)
    tensor.untyped_storage().resize_(NUM_BYTES)
    tensor.fill_(3)
    assert tensor[-1].item() == 3
    assert allocated(device) == pytest.approx(before, abs=SLACK)


@pytest.mark.covers("memory.pool")
def test_a_pool_has_the_memory_allocated_in_it_and_no_other(device: Device) -> None:
    with device.memory.pool("conformance") as pool:
        inside = filled(device, NUM_BYTES)
    outside = filled(device, NUM_BYTES)
    stats = pool.stats()
    assert stats.allocated_bytes == pytest.approx(NUM_BYTES, abs=SLACK)
    assert stats.reserved_bytes >= stats.allocated_bytes
    assert device.memory.pool("conformance").stats() == stats
    del inside
    assert pool.stats().allocated_bytes == 0
    device.synchronize()
    device.memory.empty_cache()
    assert pool.stats().reserved_bytes == 0
    assert outside.sum(dtype=torch.int64).item() == NUM_BYTES


@pytest.mark.covers("memory.pool")
def test_pools_of_two_tags_are_apart(device: Device) -> None:
    with device.memory.pool("conformance a") as a:
        first = filled(device, MB)
    with device.memory.pool("conformance b") as b:
        second = filled(device, 2 * MB)
    with device.memory.pool("conformance a"):
        third = filled(device, MB)
    for pool in (a, b):
        assert pool.stats().allocated_bytes == pytest.approx(2 * MB, abs=MB // 4)  # an allocator rounds up
    del first, second, third
    device.synchronize()
    device.memory.empty_cache()


@pytest.mark.covers("memory.pool")
@pytest.mark.parametrize("tag", ["", 7])
def test_a_tag_that_is_none_is_refused(device: Device, tag: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"pool takes a tag such as 'weights', got {tag!r}"):
        device.memory.pool(tag)
