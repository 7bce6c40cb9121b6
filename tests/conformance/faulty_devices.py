"""A plugin of pytest that makes the device under test wrong in one way for each run of some tests, and only then.

A test of the suite runs once for each fault that it has to find, which stands in the test's name. A fault is of this
process, or of the other processes alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import mmap
import os
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlcore.collectives.operations import Operations
from rlcore.conformance.peer import PeerPool
from rlcore.device import Device
from rlcore.devices.host_memory import HostBuffer, check_nbytes, map_pages
from rlcore.devices.ipc.exporter import exporter
from rlcore.registry import get_device
from rlcore.types import Capability, MemoryStats

Plant = Callable[[Any], AbstractContextManager[Any]]
"""Device -> the context in which it is wrong."""

HOST = torch.device("cpu")
_kept: list[Any] = []


def _nothing(*_: Any, **__: Any) -> None:
    """Instead of a member that should have done something."""


def _owner(device: Device, part: str) -> Any:
    """The class of a part of the device; "" is the device itself."""
    return type(getattr(device, part) if part else device)


def instead(part: str, member: str, other: Any = _nothing) -> Plant:
    """The member does something else."""
    return lambda device: mock.patch.object(_owner(device, part), member, other)


def around(part: str, member: str, other: Callable[..., Any]) -> Plant:
    """The member is ``other(the right one, self, *arguments)``."""

    def plant(device: Device) -> AbstractContextManager[Any]:
        right = getattr(_owner(device, part), member)
        return mock.patch.object(
            _owner(device, part), member, lambda self, *values, **options: other(right, self, *values, **options)
        )

    return plant


# ------------------------------------------------------------------------------------------------- memory


def _every_member_is_native(right: Any, self: Any) -> Any:
    return dict.fromkeys(right(self), Capability("native", "hardware"))


def _statistics_never_change(device: Device) -> AbstractContextManager[Any]:
    first = device.memory.stats()
    return mock.patch.object(type(device.memory), "stats", lambda self: first)


def _copies(change: Callable[[Sequence[Any], Sequence[Any]], tuple[Sequence[Any], Sequence[Any]]]) -> Plant:
    """A batch is copied, after it was checked, as if its destinations and sources were others."""

    def copy(right: Any, self: Any, batch: Any) -> None:
        batch.dst.tensors, batch.src.tensors = change(batch.dst.tensors, batch.src.tensors)
        right(self, batch)

    return around("memory", "_copy", copy)


def _each(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    return _copies(lambda dst, src: (dst, [change(one) for one in src]))


_WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _through_float32(values: torch.Tensor) -> torch.Tensor:
    return values.float().long() if values.dtype == torch.int64 else values


def _without_nan(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num(nan=0, posinf=math.inf, neginf=-math.inf) if values.dtype in _WIDE else values


def _without_infinity(values: torch.Tensor) -> torch.Tensor:
    return values.where(~values.isinf(), torch.finfo(values.dtype).max) if values.dtype in _WIDE else values


def _first_bytes(limit: int) -> Plant:
    def cut(values: torch.Tensor) -> torch.Tensor:
        return values.view(-1)[: limit // values.itemsize] if values.nbytes > limit else values

    return _copies(lambda dst, src: (list(map(cut, dst)), list(map(cut, src))))


def _one_memory_for_all_buffers(device: Device) -> AbstractContextManager[Any]:
    memory = map_pages(64 << 20)
    return allocating(lambda nbytes: memory[:nbytes])(device)


def allocating(memory_of: Callable[[int], Any]) -> Plant:
    """Host buffers are of this memory."""

    def host_alloc(self: Any, nbytes: int) -> HostBuffer:
        check_nbytes(nbytes)
        return HostBuffer(memory_of(nbytes), is_pinned=self.can_pin)

    return instead("memory", "host_alloc", host_alloc)


def _absent_pages(nbytes: int) -> Any:
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)


def _half_pinned(nbytes: int) -> Any:
    memory = map_pages(nbytes)
    torch.ops.simdev.adopt_pinned(memory.ctypes.data, -(-nbytes // 2))
    weakref.finalize(memory, torch.ops.simdev.forget_pinned, memory.ctypes.data)
    return memory


def _free_leaks(right: Any, self: Any, buffer: Any) -> None:
    _kept.append(map_pages(buffer.nbytes))
    right(self, buffer)


# ------------------------------------------------------------------------------------------------- exports


def _exports_leak(device: Device) -> AbstractContextManager[Any]:
    kind: Any = type(device.memory)
    share = kind.sharing_class.share
    return mock.patch.object(kind.sharing_class, "share", lambda self, storage: (os.dup(0), share(self, storage))[1])


def _closing_one_unmaps_all(device: Device) -> AbstractContextManager[Any]:
    kind: Any = type(device.memory)
    close = kind.sharing_class.close

    def unmap(self: Any, memory: Any) -> None:
        self._mapped.update({inode: (address, 1) for inode, (address, _) in self._mapped.items()})
        close(self, memory)

    return mock.patch.object(kind.sharing_class, "close", unmap)


# ------------------------------------------------------------------------------------------------- streams


class Event:
    """An event that can be wrong."""

    def __init__(self, device: Device, timing: bool) -> None:
        self.index = device.index
        self.event: Any = torch.Event(device=device.torch_device, enable_timing=timing)
        self.recorded_s = 0.0

    def record(self, stream: Any) -> None:
        self.recorded_s = time.perf_counter()
        self.event.record(stream)

    def wait(self, stream: Any) -> None:
        self.event.wait(stream)

    def query(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def elapsed_time(self, end: Event) -> float:
        return float(self.event.elapsed_time(end.event))


class TimeOfTheHost(Event):
    def elapsed_time(self, end: Event) -> float:
        return (end.recorded_s - self.recorded_s) * 1000


class FirstRecordStays(Event):
    def record(self, stream: Any) -> None:
        if not self.recorded_s:
            super().record(stream)


class NoWaitElsewhere(Event):
    def synchronize(self) -> None:
        if not self.index:
            super().synchronize()


def _events(kind: type[Event]) -> Plant:
    return instead("streams", "_new_event", lambda self, timing, interprocess: kind(self._device, timing))


def _of_events(member: str, other: Callable[..., Any]) -> Plant:
    """Return the plant of events of the CPU whose ``member`` is ``other``."""

    def plant(device: Device) -> AbstractContextManager[Any]:
        kind = type(device.streams.event())
        return mock.patch.object(kind, member, functools.partialmethod(_called, other, getattr(kind, member)))

    return plant


def _called(self: Any, other: Callable[..., Any], right: Any, *arguments: Any) -> Any:
    return other(right, self, *arguments)


def _record_once(right: Any, self: Any, stream: Any = None) -> None:
    if self._recorded_s is None:
        right(self, stream)


@contextlib.contextmanager
def _use_outlasts_an_error(device: Device) -> Iterator[None]:
    before = device.streams.current()

    @contextlib.contextmanager
    def use(self: Any, stream: Any) -> Iterator[Any]:
        stream.__enter__()
        yield stream
        stream.__exit__(None, None, None)

    with mock.patch.object(type(device.streams), "use", use):
        yield
    torch.accelerator.set_stream(before)


@contextlib.contextmanager
def _use_leaves_its_device(self: Any, stream: Any) -> Iterator[Any]:
    with stream:
        yield stream
    torch.accelerator.set_device_index(self._device.index)


def _new_on_the_first(right: Any, self: Any, priority: int = 0) -> Any:
    return torch.Stream(device=f"{self._device.type}:0", priority=priority)


def _current_of_the_first(right: Any, self: Any) -> Any:
    return torch.accelerator.current_stream(torch.device(self._device.type, 0))


# ------------------------------------------------------------------------------------------------- values


class Operators(TorchDispatchMode):
    """Torch with some operators changed: ``change(operator, arguments)`` returns what is to be done, or None."""

    def __init__(self, change: Callable[..., Callable[[], Any] | None]) -> None:
        super().__init__()
        self._change = change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self._change(func, *args)
        return func(*args, **(kwargs or {})) if found is None else found()


def operators(change: Callable[..., Callable[[], Any] | None]) -> Plant:
    return lambda device: Operators(change)


def _fails_in_inference_mode(func: Any, *_: Any) -> None:
    if torch.is_inference_mode_enabled():
        raise NotImplementedError(f"{func} has no kernel for inference tensors")


def _is_there(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "simdev"


def _view(value: torch.Tensor) -> torch.Tensor:
    return torch.ops.simdev.host_view(value) if _is_there(value) else value


def _copies_to_the_host_do_not_wait(func: Any, *arguments: Any) -> Any:
    if func is torch.ops.aten._to_copy.default and _is_there(arguments[0]):
        return lambda: _view(arguments[0]).clone()
    if func is torch.ops.aten.copy_.default and _is_there(arguments[1]) and not _is_there(arguments[0]):
        return lambda: arguments[0].copy_(_view(arguments[1]))
    return None


def _items_do_not_wait(func: Any, *arguments: Any) -> Any:
    if func is torch.ops.aten._local_scalar_dense.default and _is_there(arguments[0]):
        return lambda: _view(arguments[0]).item()
    return None


def _copies_from_the_host_do_not_wait(func: Any, *arguments: Any) -> Any:
    if func is torch.ops.aten.copy_.default and _is_there(arguments[0]) and not _is_there(arguments[1]):
        return lambda: (_view(arguments[0]).copy_(arguments[1]), arguments[0])[1]
    return None


def _copies_from_the_host_read_late(func: Any, *arguments: Any) -> Any:
    """As if all host memory were pinned, and every copy non-blocking."""
    if func is torch.ops.aten.copy_.default and _is_there(arguments[0]) and not _is_there(arguments[1]):
        torch.ops.simdev.adopt_pinned(arguments[1].data_ptr(), arguments[1].nbytes)
        _kept.append(arguments[1])
        return lambda: func(*arguments[:2], True)
    return None


def _sent(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """Change values on their way to the device."""

    def changed(func: Any, *arguments: Any) -> Any:
        if func is torch.ops.aten.copy_.default and _is_there(arguments[0]) and not _is_there(arguments[1]):
            return lambda: func(arguments[0], change(arguments[1]))
        return None

    return operators(changed)


def _computed_without_nan(func: Any, *arguments: Any) -> Any:
    if func in (torch.ops.aten.mul.Tensor, torch.ops.aten.sub.Tensor) and _is_there(arguments[0]):
        return lambda: func(*arguments).nan_to_num(nan=0, posinf=math.inf, neginf=-math.inf)
    return None


# ------------------------------------------------------------------------------------------------- collectives


def reduced(change: Callable[[torch.Tensor, str], torch.Tensor], *, first: bool = False) -> Plant:
    """What is all-reduced is changed before or after."""

    def all_reduce(self: Any, tensor: torch.Tensor, op: str = "sum", **options: Any) -> torch.Tensor:
        if first:
            tensor.copy_(change(tensor, op))
        right(self, tensor, op, **options)
        return tensor if first else tensor.copy_(change(tensor, op))

    right: Any = Operations.all_reduce
    return lambda device: mock.patch.object(Operations, "all_reduce", all_reduce)


def results(operation: str, change: Callable[[torch.Tensor], Any]) -> Plant:
    """What an operation returns is changed in place."""
    right: Any = getattr(Operations, operation)

    def changed(self: Any, *arguments: Any, **options: Any) -> Any:
        found = right(self, *arguments, **options)
        for tensor in found if isinstance(found, list) else [found]:
            change(tensor)
        return found

    return lambda device: mock.patch.object(Operations, operation, changed)


def _no_negatives(values: torch.Tensor, op: str) -> torch.Tensor:
    if op != "max" or values.dtype.is_complex or not values.dtype.is_signed:
        return values
    return values.double().clamp(min=0).to(values.dtype)


def _in_bfloat16(values: torch.Tensor, op: str) -> torch.Tensor:
    return values.bfloat16().float() if values.dtype == torch.float32 else values


def _in_float32(values: torch.Tensor, op: str) -> torch.Tensor:
    return values.float().double() if values.dtype == torch.float64 else values


def _end_of_many(values: torch.Tensor) -> None:
    """The result, or a rank's part of it, of more than four million elements."""
    if values.numel() > 2 << 20:
        values.view(-1)[-1:].fill_(-1)


def refused_if_empty(operation: str) -> Plant:
    right: Any = getattr(Operations, operation)

    def refusing(self: Any, tensor: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(tensor, torch.Tensor) and not tensor.numel() and (operation != "all_gather" or self.rank == 0):
            raise RuntimeError("invalid argument: count is 0")
        return right(self, tensor, *arguments, **options)

    return lambda device: mock.patch.object(Operations, operation, refusing)


def _waits_for_the_first_stream(device: Device) -> AbstractContextManager[Any]:
    from rlcore_simdev import simccl

    first = device.streams.current()

    def on_host(value: Any) -> Any:
        if isinstance(value, list):
            return [on_host(item) for item in value]
        if _is_there(value):
            first.synchronize()
            return _view(value)
        return value

    return mock.patch.object(simccl, "_on_host", on_host)


# ------------------------------------------------------------------------------------------------- table


class Fault(NamedTuple):
    test: str
    """The test that has to fail, for some of its parameters."""
    plant: Plant
    is_there: bool = False
    """It is planted in the other processes."""


_REDUCTIONS = "test_collectives::test_every_reduction_is_right_or_refused_as_declared"
_NOT_FINITE = "test_collectives::test_nan_and_infinity_of_one_rank_reach_all"
_MANY = "test_collectives::test_tensors_of_many_elements_are_right_to_their_end"
_EMPTY = "test_collectives::test_tensors_of_no_elements_are_taken"
_BATCH = "test_host_memory::test_a_batch_copies_every_pair_whatever_its_direction_dtype_and_strides"
_LARGE = "test_host_memory::test_a_batch_copies_a_large_tensor_to_its_last_byte"
_TO_HOST = "test_streams::test_a_copy_to_the_host_comes_after_the_work_before_it"
_FROM_HOST = "test_streams::test_a_copy_from_the_host_comes_after_the_work_before_it"
_BITS = "test_values::test_what_is_sent_there_and_back_has_the_same_bits"
_NAN = "test_values::test_nan_and_infinity_are_computed_with_as_on_the_cpu"
_INFERENCE = "test_values::test_inference_mode_computes_what_it_does_on_the_cpu"
_PAGE = "test_host_memory::test_a_host_buffer_begins_at_a_page_and_is_pinned_to_its_end"
_TIME = "test_streams::test_elapsed_time_is_in_milliseconds"

CPU: dict[str, Fault] = {
    "every_member_is_native": Fault(
        "test_capabilities::test_a_member_is_refused_exactly_where_capabilities_say_so_and_for_that_reason",
        around("streams", "capabilities", _every_member_is_native),
    ),
    "init_kwargs_are_empty": Fault(
        "test_collectives::test_a_timeout_that_is_none_is_refused",
        instead("collectives", "init_kwargs", lambda *_, **__: {}),
    ),
    "the_last_copy_is_forgotten": Fault(_BATCH, _copies(lambda dst, src: (dst[:-1], src[:-1]))),
    "copies_after_the_512th_are_forgotten": Fault(_BATCH, _copies(lambda dst, src: (dst[:512], src[:512]))),
    "copies_after_the_1024th_are_forgotten": Fault(_BATCH, _copies(lambda dst, src: (dst[:1024], src[:1024]))),
    "int64_is_copied_as_float32": Fault(_BATCH, _each(_through_float32)),
    "nan_is_copied_as_0": Fault(_BATCH, _each(_without_nan)),
    "infinity_is_copied_as_a_number": Fault(_BATCH, _each(_without_infinity)),
    "bytes_after_16_mib_are_not_copied": Fault(_LARGE, _first_bytes(16 << 20)),
    "bytes_after_32_mib_are_not_copied": Fault(_LARGE, _first_bytes(32 << 20)),
    "the_last_byte_is_not_copied": Fault(_LARGE, _first_bytes((33 << 20) + 4)),
    "host_memory_is_of_whole_pages": Fault(
        "test_host_memory::test_a_host_buffer_has_exactly_its_size_and_travels_there_and_back",
        around("memory", "host_alloc", lambda right, self, nbytes: right(self, -(-nbytes // 4096) * 4096)),
    ),
    "buffers_share_memory": Fault(
        "test_host_memory::test_two_host_buffers_share_no_memory", _one_memory_for_all_buffers
    ),
    "buffers_begin_behind_a_header": Fault(_PAGE, allocating(lambda nbytes: map_pages(nbytes + 64)[64:])),
    "pages_are_absent": Fault(
        "test_host_memory::test_the_pages_of_a_host_buffer_are_present", allocating(_absent_pages)
    ),
    "freed_buffers_leak": Fault(
        "test_host_memory::test_freed_host_buffers_leave_no_memory_behind", around("memory", "host_free", _free_leaks)
    ),
    "random_states_are_not_set": Fault(
        "test_identity::test_a_random_state_continues_where_it_was_taken", instead("", "set_rng_state")
    ),
    "seeds_are_ignored": Fault("test_identity::test_a_seed_decides_what_is_drawn", instead("", "seed")),
    "seeds_are_cut_to_32_bits": Fault(
        "test_identity::test_all_64_bits_of_a_seed_count",
        around("", "seed", lambda right, self, value: right(self, value & 0xFFFFFFFF)),
    ),
    "seeds_are_cut_to_63_bits": Fault(
        "test_identity::test_all_64_bits_of_a_seed_count",
        around("", "seed", lambda right, self, value: right(self, value & (2**63 - 1))),
    ),
    "count_is_3": Fault(
        "test_identity::test_count_is_what_the_list_of_devices_says", instead("", "count", lambda self: 3)
    ),
    "operators_fail_in_inference_mode": Fault(_INFERENCE, operators(_fails_in_inference_mode)),
    "exports_leak": Fault(
        "test_ipc::test_cycles_leave_memory_descriptors_and_shared_memory_as_they_were", _exports_leak
    ),
    "exports_are_copies": Fault(
        "test_ipc::test_values_go_both_ways_through_one_memory",
        around("memory", "export_ipc", lambda right, self, tensor: right(self, tensor.clone())),
    ),
    "revoke_does_nothing": Fault(
        "test_ipc::test_revoke_has_importers_close_and_lets_the_memory_go", instead("memory", "revoke")
    ),
    "statistics_never_change": Fault(
        "test_memory::test_allocated_and_reserved_bytes_follow_a_tensor", _statistics_never_change
    ),
    "reset_peak_does_nothing": Fault(
        "test_memory::test_the_peak_remembers_what_was_freed_until_it_is_reset", instead("memory", "reset_peak")
    ),
    "ranges_have_no_name": Fault(
        "test_profiler::test_a_trace_has_the_range_and_the_work_in_it",
        instead("profiler", "range", lambda *_: contextlib.nullcontext()),
    ),
    "times_are_too_short_by_a_tenth": Fault(
        _TIME, _of_events("elapsed_time", lambda right, self, end: right(self, end) * 0.9)
    ),
    "times_are_too_long_by_a_tenth": Fault(
        _TIME, _of_events("elapsed_time", lambda right, self, end: right(self, end) * 1.1)
    ),
    "times_are_microseconds": Fault(
        _TIME, _of_events("elapsed_time", lambda right, self, end: right(self, end) * 1000)
    ),
    "times_are_whole_milliseconds": Fault(
        _TIME, _of_events("elapsed_time", lambda right, self, end: float(math.ceil(right(self, end))))
    ),
    "an_event_is_recorded_once": Fault(
        "test_streams::test_an_event_has_the_time_of_its_last_record", _of_events("record", _record_once)
    ),
}
"""Faults of the CPU device by name."""

CPU_COLLECTIVES: dict[str, Fault] = {
    "max_of_negatives_is_0": Fault(_REDUCTIONS, reduced(_no_negatives), is_there=True),
    "float32_is_reduced_in_bfloat16": Fault(_REDUCTIONS, reduced(_in_bfloat16), is_there=True),
    "float64_is_reduced_in_float32": Fault(_REDUCTIONS, reduced(_in_float32), is_there=True),
    "nan_is_lost": Fault(_NOT_FINITE, reduced(lambda values, op: _without_nan(values), first=True), is_there=True),
    "nan_is_lost_by_max": Fault(
        _NOT_FINITE,
        reduced(lambda values, op: _without_nan(values) if op == "max" else values, first=True),
        is_there=True,
    ),
    "infinity_is_reduced_as_a_number": Fault(
        _NOT_FINITE, reduced(lambda values, op: _without_infinity(values), first=True), is_there=True
    ),
    **{
        f"{operation}_forgets_the_tail": Fault(_MANY, results(operation, _end_of_many), is_there=True)
        for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    },
    **{
        f"{operation}_refuses_no_elements": Fault(_EMPTY, refused_if_empty(operation), is_there=True)
        for operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    },
}
"""Faults of groups of CPU devices; tests of them are in no other table of the CPU."""

_ORDER = "test_streams::test_what_waits_sees_what_it_waited_for"
_COLLECTIVES = "test_collectives::test_a_collective_comes_after_what_was_queued_before_it"
_STREAMS = "test_indices::test_streams_are_of_the_device_that_was_asked"
_RANDOM = "test_indices::test_random_numbers_are_of_the_device_that_was_asked"

SIMDEV: dict[str, Fault] = {
    "copies_to_the_host_do_not_wait": Fault(_TO_HOST, operators(_copies_to_the_host_do_not_wait)),
    "items_do_not_wait": Fault(_TO_HOST, operators(_items_do_not_wait)),
    "copies_from_the_host_do_not_wait": Fault(_FROM_HOST, operators(_copies_from_the_host_do_not_wait)),
    "copies_from_the_host_read_late": Fault(_FROM_HOST, operators(_copies_from_the_host_read_late)),
    "int64_is_sent_as_float32": Fault(_BITS, _sent(_through_float32)),
    "nan_is_sent_as_0": Fault(_BITS, _sent(_without_nan)),
    "nan_is_computed_as_0": Fault(_NAN, operators(_computed_without_nan)),
    "operators_fail_in_inference_mode": Fault(_INFERENCE, operators(_fails_in_inference_mode)),
    "kept_memory_is_allocated": Fault(
        "test_memory::test_freed_memory_that_the_allocator_keeps_is_not_allocated",
        around("memory", "stats", lambda right, self: _all_is_allocated(right(self))),
    ),
    "half_of_a_buffer_is_pinned": Fault(_PAGE, allocating(_half_pinned)),
    "an_event_is_recorded_once": Fault(_ORDER, _events(FirstRecordStays)),
    "times_are_those_of_the_host": Fault(_TIME, _events(TimeOfTheHost)),
    "use_outlasts_an_error": Fault(
        "test_streams::test_an_error_inside_use_puts_the_last_stream_back_too", _use_outlasts_an_error
    ),
    "use_leaves_its_device": Fault(_STREAMS, instead("streams", "use", _use_leaves_its_device)),
    "streams_are_of_the_first_device": Fault(_STREAMS, around("streams", "new", _new_on_the_first)),
    "the_current_stream_is_the_first_devices": Fault(_STREAMS, around("streams", "current", _current_of_the_first)),
    "events_of_other_devices_do_not_wait": Fault(
        "test_indices::test_an_event_is_reached_by_the_stream_of_the_device_that_was_asked", _events(NoWaitElsewhere)
    ),
    "synchronize_waits_for_the_first_device": Fault(
        "test_indices::test_synchronize_waits_for_the_device_that_was_asked",
        instead("", "synchronize", lambda self: torch.accelerator.synchronize(torch.device(self.type, 0))),
    ),
    "seeds_go_to_the_first_device": Fault(
        _RANDOM, instead("", "_generator", lambda self: self._module.default_generators[0])
    ),
    "statistics_are_of_the_first_device": Fault(
        "test_indices::test_statistics_are_of_the_device_that_was_asked",
        around("memory", "stats", lambda right, self: right(self) if not self._device.index else _of_the_first(self)),
    ),
    "the_ledger_is_of_all_devices": Fault(
        "test_indices::test_the_ledger_has_the_exports_of_its_own_device",
        instead("memory", "ledger", lambda self: exporter().ledger()),
    ),
    "closing_one_unmaps_all": Fault(
        "test_ipc::test_two_tensors_of_one_block_of_memory_are_closed_and_revoked_each_by_itself",
        _closing_one_unmaps_all,
        is_there=True,
    ),
    "collectives_wait_for_the_first_stream": Fault(_COLLECTIVES, _waits_for_the_first_stream, is_there=True),
}
"""Faults of simdev by name, beside those of its own sources."""


def _all_is_allocated(found: MemoryStats) -> MemoryStats:
    return dataclasses.replace(found, allocated_bytes=found.reserved_bytes)


def _of_the_first(memory: Any) -> MemoryStats:
    return get_device(f"{memory._device.type}:0").memory.stats()


FAULTS = {"cpu": CPU | CPU_COLLECTIVES, "simdev": SIMDEV}
"""Device -> its faults."""


# ------------------------------------------------------------------------------------------------- planting


@pytest.fixture(autouse=True)
def fault(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    test = f"{metafunc.definition.path.stem}::{metafunc.function.__name__}"
    faults = FAULTS[metafunc.config.getoption("--device")]
    metafunc.parametrize("fault", [name for name, fault in faults.items() if fault.test == test], indirect=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Generator[None]:
    name, device = item.callspec.params["fault"], item.funcargs.get("device")
    found = _fault(item.config.getoption("--device"), name)
    if found.is_there:
        pool: PeerPool = item.funcargs["peers"]
        with _in_others(pool, name):
            return (yield)
    with _planted(found, device):
        return (yield)


def _fault(device_name: str, name: str) -> Fault:
    return FAULTS[device_name.partition(":")[0]][name]


def _planted(fault: Fault, device: Any) -> AbstractContextManager[Any]:
    try:
        return fault.plant(device)
    except Exception as error:  # else the test fails, as if it had found the fault
        pytest.exit(f"a fault for {fault.test} could not be planted: {error!r}", returncode=3)


@contextlib.contextmanager
def _in_others(pool: PeerPool, name: str) -> Iterator[None]:
    others = [peer for peers in pool._by_device.values() for peer in peers if peer.is_alive]
    assert others
    for peer in others:
        peer.ask("faulty_devices:plant", name)
    try:
        yield
    finally:
        for peer in others:
            if peer.is_alive:  # the fault may have ended it
                peer.ask("faulty_devices:mend")


_of_this_process = contextlib.ExitStack()


def plant(device: Device, name: str) -> None:
    _of_this_process.enter_context(_fault(device.name, name).plant(device))


def mend(device: Device) -> None:
    _of_this_process.close()
