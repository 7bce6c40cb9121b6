"""Offload of plain modules: bytes, identity, memory, and what is left after every kind of failure."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rlcore
from rlcore.engines.offload import host_arena as arena_module
from rlcore.engines.offload import transfer as transfer_module
from rlcore.engines.offload.group import GradientGroup, OffloadGroup, optimizer_tensors, swap_groups
from rlcore.engines.offload.guards import Guard
from rlcore.engines.offload.host_arena import HostAllocation, HostArena, arena_of
from rlcore.engines.offload.storages import distinct_storages
from rlcore.errors import DeviceError, StateError, UnsupportedError
from tests.accuracy import assert_same_bits

KIB = 1024


@pytest.fixture(autouse=True)
def _small_blocks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, short_runtime_folder: Path
) -> Iterator[None]:
    """So that small sets take many blocks and allocations, and begin with an empty arena."""
    monkeypatch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
    for module in (arena_module, transfer_module):
        monkeypatch.setattr(module, "BLOCK_BYTES", 4 * KIB)
    monkeypatch.setattr(arena_module, "_ALLOCATION_BYTES", 16 * KIB)
    monkeypatch.setattr(arena_module, "_arenas", {})
    yield
    if request.node.get_closest_marker("gpu"):  # what is pinned is scarce
        gc.collect()
        arena_of(rlcore.get_device("cuda")).trim()


def no_guard(*_: Any) -> None:
    pass


def group_of(device: Any, tensors: Sequence[Tensor]) -> OffloadGroup:
    return OffloadGroup(device, lambda: tensors, no_guard)


def random_tensors(device: Any, sizes: Sequence[int], seed: int = 0) -> list[Tensor]:
    """[size] uint8 each."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(256, (size,), generator=generator, dtype=torch.uint8).to(device.torch_device) for size in sizes
    ]


class SmallDevice:
    """Storages that grow in place count against a limit, as the memory of a device that is nearly full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit_bytes: int, live: Sequence[Tensor] = ()) -> None:
        self.limit_bytes = limit_bytes
        self.live_bytes = self.peak_bytes = sum(storage.nbytes() for storage in distinct_storages(live))
        resize = torch.UntypedStorage.resize_

        def limited(storage: torch.UntypedStorage, nbytes: int) -> Any:
            after = self.live_bytes + nbytes - storage.nbytes()
            if after > self.limit_bytes:
                raise torch.OutOfMemoryError(f"no memory for {nbytes} bytes")
            self.live_bytes, self.peak_bytes = after, max(self.peak_bytes, after)
            return resize(storage, nbytes)

        monkeypatch.setattr(torch.UntypedStorage, "resize_", limited)


ODD_SIZES = (1, 63, 64, 65, 4 * KIB, 4 * KIB + 1, 30_000, 7, 0, 12_345)


# ------------------------------------------------------------------------------------------------- moves


def test_everything_comes_back_bit_equal_into_the_same_storages(device: Any) -> None:
    tensors = random_tensors(device, ODD_SIZES)
    views = [*tensors, tensors[6][10:20], tensors[6].view(3, 10_000)]
    before = [tensor.clone() for tensor in views]
    group = group_of(device, views)
    report = group.offload()
    total = sum(ODD_SIZES)
    assert report.moved_bytes == report.freed_device_bytes == total
    assert [storage.nbytes() for storage in distinct_storages(views)] == [0] * len(tensors)
    assert group.device_bytes == 0 and group.host_bytes >= total
    report = group.onload()
    assert report.moved_bytes == total and report.freed_device_bytes == -total
    assert all(map(torch.equal, views, before))
    assert group.device_bytes == total and group.host_bytes == 0


def test_moving_twice_does_nothing(device: Any) -> None:
    group = group_of(device, random_tensors(device, [100]))
    assert group.onload().moved_bytes == 0
    group.offload()
    assert group.offload().moved_bytes == 0
    assert group.onload().moved_bytes == 100


def test_pinned_says_what_the_memory_was(device: Any) -> None:
    report = group_of(device, random_tensors(device, [100])).offload()
    assert report.pinned is device.memory.can_pin


def test_many_small_tensors_leave_in_few_calls(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(arena_module, "_ALLOCATION_BYTES", 1 << 20)
    tensors = random_tensors(device, [512] * 5000)
    copy_batch, calls = device.memory.copy_batch, []
    monkeypatch.setattr(device.memory, "copy_batch", lambda *args: (calls.append(len(args[0])), copy_batch(*args)))
    group_of(device, tensors).offload()
    assert sum(calls) >= 5000 and len(calls) <= 4


def test_what_a_device_does_not_hold_stays(device: Any) -> None:
    if device.type == "cpu":
        pytest.skip("every tensor is on the cpu device")
    steps = torch.ones(3)
    group = group_of(device, [steps, *random_tensors(device, [64])])
    assert group.offload().freed_device_bytes == 64
    assert steps.sum() == 3


def test_meta_frees_both_sides_and_gives_room_back(device: Any) -> None:
    tensors = random_tensors(device, [30_000, 64])
    group = group_of(device, tensors)
    group.offload()
    report = group.meta()
    assert report.moved_bytes == report.freed_device_bytes == group.host_bytes == 0
    assert arena_of(device).free_bytes == arena_of(device).total_bytes
    report = group.onload()
    assert (report.moved_bytes, report.freed_device_bytes) == (0, -30_064)
    assert group.meta().freed_device_bytes == 30_064
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0]


# ------------------------------------------------------------------------------------------------- arena


def test_allocations_have_the_exact_size_and_are_used_again(device: Any) -> None:
    first, second = (group_of(device, random_tensors(device, [50_000, 1])) for _ in range(2))
    report = first.offload()
    assert report.first_use
    assert arena_of(device).total_bytes == 50_048 + 64
    first.onload()
    assert not second.offload().first_use
    assert arena_of(device).total_bytes == 50_048 + 64
    assert arena_of(device).free_bytes == 0


def test_the_host_memory_of_a_dropped_set_is_free_again(device: Any) -> None:
    group = group_of(device, random_tensors(device, [50_000]))
    group.offload()
    arena = arena_of(device)
    assert arena.trim() == 0
    del group
    gc.collect()
    assert arena.trim() == arena_of(device).total_bytes + 50_048
    assert arena.total_bytes == 0


def test_reserved_memory_is_there_before_the_first_move(device: Any) -> None:
    arena = arena_of(device)
    assert arena.reserve(100_000)
    arena.wait()
    assert arena.free_bytes == 100_032
    assert not arena.reserve(100_000)
    assert not group_of(device, random_tensors(device, [99_000])).offload().first_use


def test_the_smallest_block_that_is_large_enough_is_lent_or_the_largest() -> None:
    arena = HostArena(rlcore.get_device("cpu"))
    for total in (KIB, 5 * KIB, 7 * KIB):
        arena.reserve(total)
        arena.wait()
    assert [arena.take(wanted, waits=False).nbytes for wanted in (KIB + 1, KIB + 1, 4 * KIB)] == [
        *(2 * KIB, 4 * KIB),
        KIB,
    ]
    assert arena.take(1, waits=False) is None


def test_what_is_still_being_allocated_is_given_back_too(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, has_been_trimmed, allocate = threading.Event(), threading.Event(), HostArena._allocate
    given_back: list[int] = []

    def late(self: HostArena, nbytes: int) -> Any:
        has_begun.set()
        assert has_been_trimmed.wait(60)
        return allocate(self, nbytes)

    def spied(self: HostArena, allocation: HostAllocation) -> None:
        given_back.append(allocation.tensor.numel())
        free(self, allocation)

    free = HostArena._free_allocation
    monkeypatch.setattr(HostArena, "_allocate", late)
    monkeypatch.setattr(HostArena, "_free_allocation", spied)
    arena, others = arena_of(device), threading.enumerate()
    assert arena.reserve(3 * 16 * KIB)
    (thread,) = set(threading.enumerate()) - set(others)
    assert has_begun.wait(60)
    assert arena.trim() == 0
    arena.wait()  # nothing is reserved any more
    assert arena.reserve(KIB), "what was reserved before does not count"
    has_been_trimmed.set()
    thread.join(60)
    assert given_back == [16 * KIB], "the two allocations that were to follow are not allocated"
    arena.wait()
    assert arena.total_bytes == arena.free_bytes == KIB


def test_too_little_host_memory_is_refused_before_anything_moves(device: Any) -> None:
    arena_of(device).set_limit(20_000)
    tensors = random_tensors(device, [15_000, 15_000])
    before = [tensor.clone() for tensor in tensors]
    group = group_of(device, tensors)
    message = "needs 30080 bytes of host memory more, and host_memory_bytes is 20000 bytes, of which 0 are used; raise"
    with pytest.raises(DeviceError, match=message):
        group.offload()
    assert all(map(torch.equal, tensors, before))
    assert arena_of(device).total_bytes == 0
    arena_of(device).set_limit(None)
    group.offload()


def test_pageable_memory_is_used_and_named_where_pinning_fails(
    device: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(nbytes: int) -> Any:
        raise DeviceError("planted")

    monkeypatch.setattr(device.memory, "host_alloc", refuse)
    tensors = random_tensors(device, [30_000])
    before = tensors[0].clone()
    group = group_of(device, tensors)
    assert not group.offload().pinned
    assert "could not be pinned (planted; the lock limit, ulimit -l, is " in caplog.text
    group.onload()
    assert torch.equal(tensors[0], before)


# ---------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("num_allocations", [0, 1, 2])
def test_host_memory_that_ends_halfway_leaves_all_on_the_device(
    device: Any, monkeypatch: pytest.MonkeyPatch, num_allocations: int
) -> None:
    made, allocate = itertools.count(), HostArena._allocate

    def limited(self: HostArena, nbytes: int) -> Any:
        if next(made) == num_allocations:
            raise DeviceError("planted: no host memory")
        return allocate(self, nbytes)

    monkeypatch.setattr(HostArena, "_allocate", limited)
    tensors = random_tensors(device, [10_000] * 5)
    before = [tensor.clone() for tensor in tensors]
    raised: list[str] = []
    group = OffloadGroup(device, lambda: tensors, lambda guard, state: raised.append(state))
    message = r"planted: no host memory. Nothing has moved: what was to leave is on"
    with pytest.raises(DeviceError, match=message):
        group.offload()
    assert all(map(torch.equal, tensors, before))
    assert not group.is_away and group.host_bytes == 0
    assert arena_of(device).free_bytes == arena_of(device).total_bytes == num_allocations * 16 * KIB
    monkeypatch.setattr(HostArena, "_allocate", allocate)
    group.offload()
    group.onload()
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("limit_bytes", [0, 9_000, 25_000, 49_999])
def test_device_memory_that_ends_halfway_leaves_all_on_the_host(
    device: Any, monkeypatch: pytest.MonkeyPatch, limit_bytes: int
) -> None:
    tensors = random_tensors(device, [10_000] * 5)
    before = [tensor.clone() for tensor in tensors]
    group = group_of(device, tensors)
    group.offload()
    with monkeypatch.context() as patched:
        small = SmallDevice(patched, limit_bytes)
        message = (
            r"has no memory for .* no memory for 10000 bytes; .* Nothing has moved: what was to come back is in host"
        )
        with pytest.raises(DeviceError, match=message):
            group.onload()
        assert small.live_bytes == 0
    assert group.is_away and group.device_bytes == 0
    group.onload()
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("failing", [0, 5])
def test_a_copy_that_fails_leaves_all_in_place(device: Any, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    tensors = random_tensors(device, [10_000] * 5)
    before = [tensor.clone() for tensor in tensors]
    group = group_of(device, tensors)
    copy_batch = device.memory.copy_batch

    def fail_at(number: int) -> None:
        made = itertools.count()

        def copy(*args: Any) -> None:
            if next(made) == number:
                raise KeyboardInterrupt
            copy_batch(*args)

        monkeypatch.setattr(device.memory, "copy_batch", copy)

    for move in (group.offload, group.onload):
        fail_at(failing)
        with pytest.raises(KeyboardInterrupt) as error:
            move()
        assert error.value.__notes__[0].startswith("Nothing has moved")
        assert group.is_away == (move == group.onload)
        assert group.device_bytes == (0 if group.is_away else 50_000)
        monkeypatch.setattr(device.memory, "copy_batch", copy_batch)
        assert move().moved_bytes == 50_000
    assert all(map(torch.equal, tensors, before))
    assert arena_of(device).free_bytes == arena_of(device).total_bytes


def test_exported_memory_is_refused(device: Any) -> None:
    (tensor,) = random_tensors(device, [1000])
    group = group_of(device, [tensor])
    handle = device.memory.export_ipc(tensor)
    with pytest.raises(
        StateError, match=r"of shape \[1000\] .* is exported to other processes.*revoke\(handle\) first"
    ):
        group.offload()
    device.memory.revoke(handle)
    if device.type == "cpu":  # torch 2.13 crashes the process when such a storage grows again
        with pytest.raises(UnsupportedError, match=r"shared memory of the host.*tensor.clone\(\)"):
            group.offload()
    else:
        group.offload()


# ------------------------------------------------------------------------------------------------- both ways


@pytest.mark.parametrize("spare_bytes", [0, 1 << 30])
def test_two_sets_that_do_not_fit_together_change_places(
    device: Any, monkeypatch: pytest.MonkeyPatch, spare_bytes: int
) -> None:
    sizes = [10_000, 300, 5_000, 20_000, 64] * 4
    first, second = (random_tensors(device, sizes, seed) for seed in (1, 2))
    before = [[tensor.clone() for tensor in tensors] for tensors in (first, second)]
    here, away = group_of(device, first), group_of(device, second)
    away.offload()
    total = sum(sizes)
    small = SmallDevice(monkeypatch, total + spare_bytes, first)
    for _ in range(3):
        out, in_ = swap_groups([here], [away])
        assert out.moved_bytes == out.freed_device_bytes == in_.moved_bytes == -in_.freed_device_bytes == total
        here, away = away, here
    assert small.peak_bytes == total, "it never took more than had left"
    swap_groups([here], [away])
    assert all(map(torch.equal, first, before[0]))
    here, away = away, here
    swap_groups([here], [away])
    assert all(map(torch.equal, second, before[1]))


def test_device_memory_that_was_freed_in_pieces_is_asked_for_again(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = random_tensors(device, [1_000] * 50, 1), random_tensors(device, [1_000] * 50, 2)
    before = [tensor.clone() for tensor in second]
    here, away = group_of(device, first), group_of(device, second)
    away.offload()
    resize, refused = torch.UntypedStorage.resize_, itertools.count()

    def fragmented(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if nbytes and next(refused) < 3:
            raise torch.OutOfMemoryError("in pieces")
        return resize(storage, nbytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", fragmented)
    swap_groups([here], [away])
    assert next(refused) > 50
    assert all(map(torch.equal, second, before))


def test_a_swap_needs_little_more_host_memory_than_the_larger_set(device: Any) -> None:
    first, second = (group_of(device, random_tensors(device, [2_000] * 200, seed)) for seed in (1, 2))
    first.offload()
    for out, in_ in ((second, first), (first, second)) * 2:
        swap_groups([out], [in_])
    assert arena_of(device).total_bytes < 1.2 * 400_000


def test_what_arrives_starts_before_all_has_left(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (group_of(device, random_tensors(device, [4 * KIB] * 20, seed)) for seed in (1, 2))
    second.offload()
    copy_batch, ways = device.memory.copy_batch, []

    def copy(dst: Any, src: Any, stream: Any) -> None:
        ways.append("out" if dst[0].data_ptr() not in {t.data_ptr() for t in second._tensors()} else "in")
        copy_batch(dst, src, stream)

    monkeypatch.setattr(device.memory, "copy_batch", copy)
    swap_groups([first], [second])
    assert ways.index("in") <= 4
    assert [way for way, _ in itertools.groupby(ways)].count("in") > 10, ways


def test_one_way_alone_is_further_ahead_of_the_allocator(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (group_of(device, random_tensors(device, [4 * KIB] * 40, seed)) for seed in (1, 2))
    copy_batch, resize, calls = device.memory.copy_batch, torch.UntypedStorage.resize_, []

    def copy(*args: Any) -> None:
        calls.append("copy")
        copy_batch(*args)

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        calls.append("allocate" if nbytes else "free")
        return resize(storage, nbytes)

    monkeypatch.setattr(device.memory, "copy_batch", copy)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", resized)
    first.offload()
    assert calls == ["copy"] * 16 + ["free", "copy"] * 24 + ["free"] * 16
    calls.clear()
    first.onload()
    assert calls == ["allocate", "copy"] * 40
    second.offload()
    calls.clear()
    swap_groups([first], [second])
    assert calls.index("free") == 3, "what comes back waits for it"


@pytest.mark.parametrize("limit_bytes", [50_000, 59_999, 75_000])
def test_a_swap_that_fails_halfway_moves_nothing(
    device: Any, monkeypatch: pytest.MonkeyPatch, limit_bytes: int
) -> None:
    first, second = random_tensors(device, [10_000] * 5, 1), random_tensors(device, [10_000, 3, 30_000] * 2, 2)
    before = [[tensor.clone() for tensor in tensors] for tensors in (first, second)]
    here, away = group_of(device, first), group_of(device, second)
    away.offload()
    with monkeypatch.context() as patched:
        small = SmallDevice(patched, limit_bytes, first)
        message = "Nothing has moved: what was to leave is on .*, what was to come back is in host memory"
        with pytest.raises(DeviceError, match=message):
            swap_groups([here], [away])
        assert small.live_bytes == 50_000
    assert not here.is_away and away.is_away
    assert all(map(torch.equal, first, before[0]))
    away.onload()
    assert all(map(torch.equal, second, before[1]))


def test_a_swap_with_no_host_memory_to_spare_is_refused_with_the_numbers(device: Any) -> None:
    here, away = (group_of(device, random_tensors(device, [10_000] * 5, seed)) for seed in (1, 2))
    away.offload()
    arena_of(device).set_limit(arena_of(device).total_bytes)
    with pytest.raises(
        DeviceError, match="needs 44608 bytes of host memory more, and host_memory_bytes is 50240 bytes"
    ):
        swap_groups([here], [away])
    assert not here.is_away and away.is_away


def test_a_swap_whose_host_memory_does_not_grow_moves_nothing(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = random_tensors(device, [10_000] * 5, 1), random_tensors(device, [10_000] * 5, 2)
    before = [[tensor.clone() for tensor in tensors] for tensors in (first, second)]
    here, away = group_of(device, first), group_of(device, second)
    away.offload()

    def refuse(self: HostArena, nbytes: int) -> Any:
        raise DeviceError("planted: no host memory")

    with monkeypatch.context() as patched:
        patched.setattr(HostArena, "_allocate", refuse)
        with pytest.raises(DeviceError, match=r"planted: no host memory\. Nothing has moved"):
            swap_groups([here], [away])
    assert not here.is_away and away.is_away
    swap_groups([here], [away])
    here.onload()
    assert all(map(torch.equal, first, before[0])) and all(map(torch.equal, second, before[1]))


def test_a_released_set_takes_only_room_in_a_swap(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = random_tensors(device, [10_000] * 5, 1), random_tensors(device, [10_000] * 5, 2)
    here, away = group_of(device, first), group_of(device, second)
    away.meta()
    with monkeypatch.context() as patched:
        SmallDevice(patched, 49_000, first)
        with pytest.raises(DeviceError, match="Nothing has moved"):
            swap_groups([], [away])
        patched.undo()
    SmallDevice(monkeypatch, 50_000, first)
    out, in_ = swap_groups([here], [away])
    assert (out.moved_bytes, in_.moved_bytes, in_.freed_device_bytes) == (50_000, 0, -50_000)


# -------------------------------------------------------------------------------------------- whole modules


class Trainer:
    """A small module with Adam, on a device, that is there only while it works."""

    def __init__(self, device: Any, seed: int) -> None:
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(37, 301), nn.Tanh(), nn.Linear(301, 11)).to(device.torch_device)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)
        self.groups = [
            group_of(device, list(self.module.parameters())),
            OffloadGroup(device, lambda: optimizer_tensors([self.optimizer]), no_guard),
            GradientGroup(device, self.module, no_guard),
        ]
        self._inputs = torch.randn(64, 37).to(device.torch_device)

    def step(self) -> float:
        """Gradients are kept until the next step."""
        self.optimizer.zero_grad()
        loss = self.module(self._inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


@pytest.mark.slow
def test_five_trainers_in_turns_learn_as_if_alone(device: Any) -> None:
    alone, in_turns = ([Trainer(device, seed) for seed in range(5)] for _ in range(2))
    expected = [[trainer.step() for _ in range(4)] for trainer in alone]
    for trainer in in_turns[1:]:
        swap_groups(trainer.groups, [])
    found: list[list[float]] = [[] for _ in in_turns]
    here = 0
    for _, position in itertools.product(range(4), range(5)):
        if position != here:
            swap_groups(in_turns[here].groups, in_turns[position].groups)
        found[position].append(in_turns[position].step())
        here = position
    assert found == expected


def test_cycles_leave_memory_as_it_was(device: Any) -> None:
    trainer = Trainer(device, 0)

    def cycle() -> None:
        trainer.step()
        swap_groups(trainer.groups, [])
        swap_groups([], trainer.groups)

    def memory() -> tuple[int, ...]:
        gc.collect()
        stats = device.memory.stats()
        on_device = 0 if device.type == "cpu" else stats.allocated_bytes
        return arena_of(device).total_bytes, arena_of(device).free_bytes, on_device

    cycle()
    cycle()
    before = memory()
    for _ in range(5):  # to the byte: what a cycle leaves is seen after one
        cycle()
    assert memory() == before
    assert before[0] == before[1] > 0


def test_the_resident_set_does_not_grow_with_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "BLOCK_BYTES", 4 << 20)
    monkeypatch.setattr(arena_module, "_ALLOCATION_BYTES", 16 << 20)
    memory = rlcore.get_device("cpu").memory
    group = group_of(rlcore.get_device("cpu"), [torch.ones(8 << 20, dtype=torch.uint8) for _ in range(4)])

    def allocated() -> int:
        memory.empty_cache()
        return int(memory.stats().allocated_bytes)

    for _ in range(2):
        group.offload()
        group.onload()
    before = allocated()
    for _ in range(8):
        group.offload()
        group.onload()
    assert allocated() - before < 16 << 20, "one set has 32 MiB"


def test_gradients_of_a_backward_pass_meanwhile_are_added(device: Any) -> None:
    module = nn.Linear(8, 8).to(device.torch_device)
    inputs = torch.ones(1, 8, device=device.torch_device)
    grads = GradientGroup(device, module, no_guard)
    module(inputs).sum().backward()
    once = module.weight.grad.clone()  # type: ignore[union-attr]
    grads.offload()
    assert module.weight.grad is None
    module(inputs).sum().backward()
    grads.onload()
    assert module.weight.grad is not None
    assert_same_bits(module.weight.grad, 2 * once, "a number and itself are added without rounding")


def test_each_use_of_what_is_away_is_refused(device: Any) -> None:
    trainer = Trainer(device, 0)
    trainer.step()
    module, optimizer = trainer.module, trainer.optimizer
    weights, states = copy.deepcopy(module.state_dict()), copy.deepcopy(optimizer.state_dict())
    other = torch.optim.SGD(module[2].parameters(), lr=1e-2)
    uses: list[Callable[[], Any]] = [
        lambda: module(torch.ones(1, 37, device=device.torch_device)),
        lambda: module[0](torch.ones(1, 37, device=device.torch_device)),
        module.state_dict,
        module[0].state_dict,
        lambda: module.load_state_dict(weights),
        lambda: copy.deepcopy(module),
        lambda: copy.deepcopy(module[0]),
        lambda: torch.optim.swa_utils.AveragedModel(module),
        lambda: module[0].reset_parameters(),  # noqa: PLW0108  # found only while it is away
        module.float,
        optimizer.step,
        other.step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(states),
        lambda: copy.deepcopy(optimizer),
    ]
    with rlcore.offloaded(module, optimizer):
        for use in (*uses, module.share_memory):
            with pytest.raises(StateError, match=r"(is|are) offloaded; call onload\('"):
                use()
    for use in uses:
        use()


def test_optimizers_of_other_modules_step_meanwhile(device: Any) -> None:
    away, here = Trainer(device, 0), Trainer(device, 1)
    with rlcore.offloaded(away.module):
        here.step()


def test_what_is_dropped_while_it_is_away_leaves_no_guard(device: Any) -> None:
    trainer = Trainer(device, 0)

    def guard(up: Guard, state: str) -> None:
        up.guard_module(trainer.module, state)

    group = OffloadGroup(device, trainer.module.parameters, guard)
    group.offload()
    optimizer = torch.optim.SGD(trainer.module.parameters())
    with pytest.raises(StateError, match="offloaded"):
        optimizer.step()
    del group
    gc.collect()
    optimizer.step()  # of no gradients


def test_a_failed_offload_leaves_no_guard(device: Any) -> None:
    trainer = Trainer(device, 0)
    arena_of(device).set_limit(1)
    with pytest.raises(DeviceError, match="host_memory_bytes is 1 bytes"), rlcore.offloaded(trainer.module):
        pass
    trainer.step()
