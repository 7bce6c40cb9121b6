"""What every device does, on each device there is: the same bodies on the CPU and on a GPU."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch

from rlcore.errors import UnsupportedError
from rlcore.registry import get_device
from tests.accuracy import assert_same_bits

MB = 2**20
NUM_BYTES = 64 * MB
SLACK = 16 * MB  # what the interpreter and the allocator move by themselves


@pytest.fixture
def without_garbage(device: Any) -> Any:
    """The device, with nothing left of earlier tests that could be freed in the midst of a count."""
    filled(device, 1)  # the first tensor makes the context
    gc.collect()
    device.memory.empty_cache()
    return device


def filled(device: Any, num_bytes: int = NUM_BYTES) -> torch.Tensor:
    return torch.ones(num_bytes, dtype=torch.uint8, device=device.torch_device)


def allocated(device: Any) -> int:
    device.synchronize()
    num_bytes: int = device.memory.stats().allocated_bytes
    return num_bytes


def test_identity_names_one_device(device: Any) -> None:
    assert device.name == f"{device.spec.name}:0"
    assert (device.type, device.index, device.vendor) == (device.torch_device.type, 0, device.spec.vendor)
    assert device.count() >= 1
    assert repr(device) == f"<{device.vendor} device {device.name}>"


def test_a_tensor_made_there_says_it_is_there(device: Any) -> None:
    assert torch.ones(1, device=device.torch_device).device == device.torch_device


def test_properties_are_those_of_the_machine(device: Any) -> None:
    found = device.properties()
    assert found == device.properties()
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", found.uuid)
    assert found.name.strip()
    assert found.capability
    assert found.cores >= 1
    total_bytes = device.memory.info().total_bytes
    assert abs(found.total_bytes - total_bytes) < total_bytes / 20


def test_allocated_bytes_follow_a_tensor(without_garbage: Any) -> None:
    device = without_garbage
    before = allocated(device)
    tensor = filled(device)
    assert abs(allocated(device) - before - NUM_BYTES) < SLACK
    del tensor
    device.memory.empty_cache()
    assert abs(allocated(device) - before) < SLACK


def test_empty_cache_gives_memory_back(without_garbage: Any) -> None:
    device = without_garbage
    before = device.memory.stats().reserved_bytes
    tensors = [filled(device, MB // 16) for _ in range(NUM_BYTES // (MB // 16))]
    last = tensors[-1]  # what is freed below it, an allocator keeps
    tensors.clear()
    assert device.memory.stats().reserved_bytes - before > NUM_BYTES / 2
    device.memory.empty_cache()
    assert device.memory.stats().reserved_bytes - before < SLACK  # what others have freed goes too
    assert last.sum().item() == MB // 16


def test_peak_remembers_what_was_freed_until_reset(without_garbage: Any) -> None:
    device = without_garbage
    device.memory.reset_peak()
    before = device.memory.stats().peak_allocated_bytes
    filled(device)
    assert abs(device.memory.stats().peak_allocated_bytes - before - NUM_BYTES) < SLACK
    device.memory.empty_cache()  # the C library keeps what it took from the heap, where there was room by chance
    device.memory.reset_peak()
    assert abs(device.memory.stats().peak_allocated_bytes - before) < SLACK


def test_memory_info_is_of_the_whole_device(device: Any) -> None:
    info = device.memory.info()
    assert 0 < info.free_bytes <= info.total_bytes
    assert device.memory.stats().allocated_bytes <= info.total_bytes


def test_synchronize_waits_for_queued_work(device: Any) -> None:
    size = 256 if device.type == "cpu" else 2048
    factor = torch.full((size, size), 1 / size, device=device.torch_device)
    product = torch.ones_like(factor)
    for _ in range(4):
        product = product @ factor
    device.synchronize()
    if device.type != "cpu":  # a processor has no stream: its operators return when they are done
        assert torch.accelerator.current_stream(device.torch_device).query()
    assert product.eq(1).all(), "each sum is of equal powers of two up to 1: no order of them rounds"


def test_seed_decides_what_is_drawn(device: Any) -> None:
    device.seed(7)
    first = torch.rand(8, device=device.torch_device)
    second = torch.rand(8, device=device.torch_device)
    device.seed(7)
    assert_same_bits(torch.rand(8, device=device.torch_device), first, "drawn from the same state")
    assert not torch.equal(first, second)


def test_rng_state_continues_where_it_was_taken(device: Any) -> None:
    state = device.rng_state()
    assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
    drawn = torch.rand(8, device=device.torch_device)
    assert not torch.equal(torch.rand(8, device=device.torch_device), drawn)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(8, device=device.torch_device), drawn)


def test_range_shows_in_a_profile(device: Any) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile, device.profiler.range("a phase"):
        torch.ones(4, device=device.torch_device).sum().item()
    names = [event.key for event in profile.key_averages()]
    assert "a phase" in names
    assert "aten::sum" in names


def test_pinned_host_memory_is_offered_where_it_helps(device: Any) -> None:
    assert device.memory.can_pin == (device.type != "cpu")
    if device.memory.can_pin:
        assert torch.empty(MB, dtype=torch.uint8, pin_memory=True).is_pinned()


@pytest.mark.slow
def test_listing_devices_makes_no_context(run_python: Any) -> None:
    code = "import rlcore, torch; rlcore.list_devices(); print(torch.cuda.is_initialized())"
    assert run_python(code).stdout == "False\n"


@pytest.mark.gpu
def test_the_check_above_sees_a_context(run_python: Any) -> None:
    code = (
        "import rlcore, torch; torch.ones(1, device='cuda'); rlcore.list_devices(); print(torch.cuda.is_initialized())"
    )
    assert run_python(code).stdout == "True\n"


@pytest.mark.parametrize(("member", "file"), [("info", "meminfo"), ("stats", "self/status")])
def test_cpu_without_proc_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, member: str, file: str) -> None:
    memory = get_device("cpu").memory
    monkeypatch.setattr("pathlib.Path.exists", lambda path: False)
    text = rf"^reading memory figures of the cpu device is not supported: they are read from /proc/{file} of Linux$"
    with pytest.raises(UnsupportedError, match=text):
        getattr(memory, member)()
