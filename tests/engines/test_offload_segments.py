"""What comes back lies in few segments of device memory, which other processes import."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.engines.offload import host_to_device
from rlcore.engines.offload.group import GradientGroup, OffloadGroup, swap_groups
from rlcore.engines.offload.host_arena import arena_of
from rlcore.engines.offload.host_to_device import HostToDevice
from rlcore.registry import get_device

MB = 1 << 20


def away(sizes: list[int], device: Any) -> tuple[OffloadGroup, list[torch.Tensor]]:
    tensors = [torch.full((size,), size % 251, dtype=torch.uint8, device=device.torch_device) for size in sizes]
    group = OffloadGroup(device, lambda: tensors, lambda guard, state: None)
    group.offload()
    return group, tensors


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """From this many bytes on there is no piece; the bytes of those that were asked for."""
    pieces: list[int] = []
    real = torch.empty

    def start(limit: int) -> list[int]:
        def empty(*size: Any, **options: Any) -> Any:
            if options.get("dtype") == torch.uint8 and isinstance(size[0], int) and size[0] > 0:
                pieces.append(size[0])
                if size[0] >= limit:
                    raise torch.OutOfMemoryError("no such piece")
            return real(*size, **options)

        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(host_to_device, "_SMALLEST_SEGMENT", 4096)
        monkeypatch.setattr(host_to_device, "_LARGEST_SMALL", 512)
        return pieces

    return start


@pytest.mark.parametrize(
    ("sizes", "pieces"),
    [
        ([1000] * 3, [3072]),
        ([4096, 100, 5000, 100, 1000, 8192], [4096, 5120, 1024 + 8192]),
        ([4096] * 64, [10 * 4096] * 6 + [4 * 4096]),
    ],
    ids=["one", "whole storages, without small ones", "at most 7"],
)
@pytest.mark.parametrize("limit", [1 << 40, 0], ids=["there", "not there"])
def test_pieces_hold_what_comes_next(
    asked: Callable[[int], list[int]], sizes: list[int], pieces: list[int], limit: int
) -> None:
    group, tensors = away(sizes, get_device("cpu"))
    found = asked(limit)
    copy = HostToDevice(group._chunks, few_segments=True)
    while copy.has_next:
        copy.next_chunk()
    assert found == pieces
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == sizes


def test_a_swap_gathers_nothing(asked: Callable[[int], list[int]]) -> None:
    group, tensors = away([4096] * 8, get_device("cpu"))
    found = asked(0)
    group.onload()
    assert not found, "nor does the host"
    assert all(tensor.eq(4096 % 251).all() for tensor in tensors)


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each time that the host was given free memory back."""
    calls: list[int] = []
    monkeypatch.setattr(get_device("cpu").memory, "empty_cache", lambda: calls.append(len(calls)))
    return calls


def test_what_leaves_is_given_back_to_the_device(emptied: list[int]) -> None:
    cpu = get_device("cpu")
    large, _ = away([8192] * 4, cpu)
    assert len(emptied) == 1
    large.offload()
    assert len(emptied) == 1, "it was away"
    large.onload()
    assert len(emptied) == 1, "nothing is free"
    small, _ = away([4096] * 4, cpu)
    swap_groups([large], [small])
    assert len(emptied) == 3, "half of it is free"
    swap_groups([small], [large])
    assert len(emptied) == 3, "all of it is used again"
    large.meta()
    assert len(emptied) == 4
    large.meta()
    assert len(emptied) == 4, "it was nowhere"


def test_a_failed_move_gives_nothing_back(emptied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = get_device("cpu")
    group, tensors = away([8192] * 4, cpu)
    group.onload()
    monkeypatch.setattr(arena_of(cpu), "reserve", lambda nbytes: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        group.offload()
    assert len(emptied) == 1
    assert all(tensor.eq(8192 % 251).all() for tensor in tensors)


def test_what_would_have_half_a_small_segment_for_itself_lies_in_a_piece(asked: Callable[[int], list[int]]) -> None:
    sizes = [512, 300, 256, 2000, 400]
    group, tensors = away(sizes, get_device("cpu"))
    found = asked(1 << 40)
    group.onload()
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == sizes, "the host has no pieces"
    group.offload()
    copy = HostToDevice(group._chunks, few_segments=True)
    while copy.has_next:
        copy.next_chunk()
    assert found == [1024 + 1024 + 2048, 1024]
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [1024, 1024, 256, 2000, 1024]


def test_small_storages_grow_where_that_costs_little(asked: Callable[[int], list[int]]) -> None:
    group, tensors = away([100] * 2 + [1 << 16], get_device("cpu"))
    found = asked(1 << 40)
    copy = HostToDevice(group._chunks, few_segments=True)
    while copy.has_next:
        copy.next_chunk()
    assert found == [1024 + 1024 + (1 << 16)]
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [1024, 1024, 1 << 16]


def test_what_grows_anyway_is_no_cost_of_others(asked: Callable[[int], list[int]]) -> None:
    group, tensors = away([100] + [300] * 10 + [1 << 16], get_device("cpu"))
    asked(1 << 40)
    copy = HostToDevice(group._chunks, few_segments=True)
    while copy.has_next:
        copy.next_chunk()
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [1024] * 11 + [1 << 16]


def test_memory_of_another_owner_makes_no_cost_little(asked: Callable[[int], list[int]]) -> None:
    asked(1 << 40)

    def chunk_of(*storages: Any) -> Any:
        return SimpleNamespace(ranges=[SimpleNamespace(storage=one, storage_bytes=one.nbytes()) for one in storages])

    foreign = SimpleNamespace(_cdata=1, nbytes=lambda: 1 << 16)
    chunk = chunk_of(torch.zeros(100, dtype=torch.uint8).untyped_storage(), foreign)
    assert host_to_device._grows_above([chunk]) == 512 // 2


def test_what_has_grown_can_be_saved(asked: Callable[[int], list[int]], tmp_path: Path) -> None:
    asked(1 << 40)
    kept = torch.randn(100)
    group = OffloadGroup(get_device("cpu"), lambda: [kept], lambda guard, state: None)
    expected = kept.clone()
    group.offload()
    (chunk,) = group._chunks
    copy = HostToDevice(group._chunks, few_segments=True)
    for there, back in zip(*copy.next_chunk().pairs(), strict=True):
        back.copy_(there)
    copy.complete(chunk, arena_of(get_device("cpu")))
    assert kept.untyped_storage().nbytes() == 1024
    torch.save({"kept": kept}, tmp_path / "file")
    assert torch.load(tmp_path / "file")["kept"].equal(expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("small", "num_segments"), [([], 0), ([MB // 8] * 100, 7), ([MB // 4] * 40, 0), ([MB] * 100, 0)]
)
def test_few_handles_open_what_has_come_back(small: list[int], num_segments: int) -> None:
    device = get_device("cuda")
    sizes = [size + 512 * number for size in (20 * MB, 4 * MB) for number in range(100)] + small
    group, tensors = away(sizes, device)
    kept = [torch.empty(20 * MB, dtype=torch.uint8, device="cuda") for _ in range(50)]
    del kept  # what torch keeps is not used again
    for cycle in range(2):
        if cycle:
            group.offload()
        group.onload()
        assert all(tensor.eq(size % 251).all() for size, tensor in zip(sizes, tensors, strict=True))
        handles, _ = device.memory.export_ipc_together(tensors)
        assert len(handles) <= 7 + num_segments + 1, "small ones lie in segments of 2 MiB"
        for handle in handles:
            device.memory.revoke(handle)


@pytest.mark.gpu
@pytest.mark.parametrize("leave", ["offload", "meta"])
def test_other_processes_have_the_memory_of_what_left(leave: str) -> None:
    device = get_device("cuda")
    group, tensors = away([20 * MB] * 50, device)
    group.onload()
    reserved, free = device.memory.stats().reserved_bytes, device.memory.info().free_bytes
    getattr(group, leave)()
    gone = 50 * 20 * MB
    assert reserved - device.memory.stats().reserved_bytes >= gone
    assert device.memory.info().free_bytes - free >= 0.9 * gone
    assert len(tensors) == 50


def test_gradients_that_are_dropped_give_back_what_others_have_left(emptied: list[int]) -> None:
    """After a train step there are none, but torch still caches the memory of them and of activations."""
    module = torch.nn.Linear(2, 2)
    group = GradientGroup(get_device("cpu"), module)
    group.meta()
    assert len(emptied) == 1
    group.onload()
    module(torch.ones(2)).sum().backward()
    group.meta()
    assert module.weight.grad is None and len(emptied) == 2
