"""Memory that an allocator unmaps and maps again, with memory of the host in the place of vLLM's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.engines.offload import group as groups
from rlcore.engines.offload import host_arena as arenas
from rlcore.engines.offload.host_arena import BLOCK_BYTES, HostArena
from rlcore.engines.sampling.vllm import mapped_allocations as regions
from rlcore.errors import DeviceError
from rlcore.registry import get_device

SIZES = [4096, 64, 1 << 16]
TAG = "weights"


class Allocator:
    """Unmapped memory is overwritten: who reads it after that sees it."""

    def __init__(self) -> None:
        self.memory = {number << 20: torch.arange(size).to(torch.uint8) for number, size in enumerate(SIZES, 1)}
        self.found = [
            SimpleNamespace(handle=(0, memory.numel(), address, 0), tag=TAG, is_asleep=False)
            for address, memory in self.memory.items()
        ]
        self.calls: list[str] = []

    def allocations(self, tag: str) -> list[Any]:
        return [one for one in self.found if one.tag == tag]

    def set_mapped(self, allocation: Any, is_mapped: bool) -> None:
        self.calls.append("map" if is_mapped else "unmap")
        if not is_mapped:
            self.memory[allocation.handle[2]].fill_(255)
        allocation.is_asleep = not is_mapped

    def storage_at(self, address: int, device: torch.device, nbytes: int) -> Any:
        start, memory = next((start, one) for start, one in self.memory.items() if 0 <= address - start < one.numel())
        assert address - start + nbytes <= memory.numel()
        part = (ctypes.c_uint8 * nbytes).from_address(memory.data_ptr() + address - start)
        return torch.frombuffer(part, dtype=torch.uint8).untyped_storage()

    @property
    def values(self) -> list[Tensor]:
        return [memory.clone() for memory in self.memory.values()]


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    found, cpu = Allocator(), get_device("cpu")
    monkeypatch.setattr(regions, "_memory", lambda: found)
    monkeypatch.setattr(type(cpu), "synchronize", lambda self: found.calls.append("wait"))
    arena = HostArena(cpu)
    monkeypatch.setattr(groups, "arena_of", lambda device: arena)
    yield found
    arena.trim()


def made(allocator: Allocator, kept: int = 0) -> regions.MappedGroup:
    return regions.MappedGroup(get_device("cpu"), TAG, lambda: list(allocator.memory.values())[:kept])


@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, 4096])
def test_it_comes_back_as_it_left_and_the_device_is_waited_for_once(
    allocator: Allocator, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arenas, "BLOCK_BYTES", block_bytes)
    group, before = made(allocator), allocator.values
    report = group.offload()
    assert (report.moved_bytes, group.device_bytes, group.is_away) == (sum(SIZES), 0, True)
    assert allocator.calls == ["wait", *["unmap"] * len(SIZES)], "a wait for each would stop the copies of the others"
    assert all(bool((memory == 255).all()) for memory in allocator.memory.values())
    assert group.onload().moved_bytes == sum(SIZES)
    assert allocator.calls[1 + len(SIZES) :] == ["map"] * len(SIZES)
    assert all(map(torch.equal, allocator.values, before))
    assert (group.device_bytes, group.is_away) == (sum(SIZES), False)


def test_what_is_kept_outlives_a_release(allocator: Allocator) -> None:
    group, before = made(allocator, kept=2), allocator.values
    assert group.meta().freed_device_bytes == sum(SIZES)
    assert group.meta().freed_device_bytes == 0
    assert allocator.calls == ["wait", *["unmap"] * len(SIZES)]
    report = group.onload()
    assert (report.moved_bytes, report.freed_device_bytes) == (0, -sum(SIZES))
    assert report.seconds > 0
    after = allocator.values
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[1])
    assert bool((after[2] == 255).all())


def test_what_finds_no_memory_stays_away_whole(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    group = made(allocator)
    group.meta()
    set_mapped = allocator.set_mapped

    def fails_at_last(allocation: Any, is_mapped: bool) -> None:
        if is_mapped and allocator.calls.count("map") == len(SIZES) - 1:
            raise RuntimeError("out of memory")
        set_mapped(allocation, is_mapped)

    monkeypatch.setattr(allocator, "set_mapped", fails_at_last)
    with pytest.raises(DeviceError, match="has no memory for 65536 bytes that come back: out of memory"):
        group.onload()
    assert (group.device_bytes, group.is_away) == (0, True)
    monkeypatch.setattr(allocator, "set_mapped", set_mapped)
    group.onload()
    assert group.device_bytes == sum(SIZES)
