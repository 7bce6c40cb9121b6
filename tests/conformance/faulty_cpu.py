"""A plugin of pytest that makes the CPU device wrong in one way for each of some tests of the suite, and only then.

Every fault is one of this process: what another process does with the device is right.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
import torch

from rlcore.registry import get_device
from rlcore.types import Capability

Patch = pytest.MonkeyPatch


def _nothing(*_: Any, **__: Any) -> None:
    """Instead of a member that should have done something."""


def _every_member_is_native(patch: Patch) -> None:
    kind = type(get_device("cpu").streams)
    found = kind.capabilities
    native = Capability("native", "hardware")
    patch.setattr(kind, "capabilities", lambda self: dict.fromkeys(found(self), native))


def _statistics_never_change(patch: Patch) -> None:
    first = get_device("cpu").memory.stats()
    patch.setattr(type(get_device("cpu").memory), "stats", lambda self: first)


def _the_last_copy_is_forgotten(patch: Patch) -> None:
    kind = type(get_device("cpu").memory)
    copy = kind.copy_batch

    def copy_batch(self: Any, dst: Sequence[torch.Tensor], src: Sequence[torch.Tensor], **options: Any) -> None:
        copy(self, dst[:-1], src[:-1], **options)

    patch.setattr(kind, "copy_batch", copy_batch)


def _host_memory_is_of_whole_pages(patch: Patch) -> None:
    kind = type(get_device("cpu").memory)
    alloc = kind.host_alloc
    patch.setattr(kind, "host_alloc", lambda self, nbytes: alloc(self, -(-nbytes // 4096) * 4096))


def _exports_leak(patch: Patch) -> None:
    kind = type(get_device("cpu").memory).sharing_class
    share = kind.share
    patch.setattr(kind, "share", lambda self, storage: (os.dup(0), share(self, storage))[1])


def _what_is_exported_is_a_copy(patch: Patch) -> None:
    kind = type(get_device("cpu").memory)
    export = kind.export_ipc
    patch.setattr(kind, "export_ipc", lambda self, tensor: export(self, tensor.clone()))


def _of(part: str, member: str, instead: Any = _nothing) -> Callable[[Patch], None]:
    """A member of a part of the device ("" is the device itself) that does something else."""
    owner = type(getattr(get_device("cpu"), part) if part else get_device("cpu"))
    return lambda patch: patch.setattr(owner, member, instead)


FAULTS: dict[str, Callable[[Patch], None]] = {
    "test_capabilities::test_a_member_is_refused_exactly_where_capabilities_say_so_and_for_that_reason"
    "[streams.export_event]": _every_member_is_native,
    "test_collectives::test_a_timeout_that_is_none_is_refused": _of("collectives", "init_kwargs", lambda *_, **__: {}),
    "test_host_memory::test_a_batch_copies_every_pair_whatever_its_direction_dtype_and_strides": (
        _the_last_copy_is_forgotten
    ),
    "test_host_memory::test_a_host_buffer_has_exactly_its_size_and_travels_there_and_back[4097]": (
        _host_memory_is_of_whole_pages
    ),
    "test_identity::test_a_random_state_continues_where_it_was_taken": _of("", "set_rng_state"),
    "test_identity::test_a_seed_decides_what_is_drawn": _of("", "seed"),
    "test_identity::test_count_is_what_the_list_of_devices_says": _of("", "count", lambda self: 3),
    "test_ipc::test_cycles_leave_memory_descriptors_and_shared_memory_as_they_were": _exports_leak,
    "test_ipc::test_values_go_both_ways_through_one_memory[torch.float32]": _what_is_exported_is_a_copy,
    "test_ipc::test_revoke_has_importers_close_and_lets_the_memory_go": _of("memory", "revoke"),
    "test_memory::test_allocated_and_reserved_bytes_follow_a_tensor": _statistics_never_change,
    "test_memory::test_the_peak_remembers_what_was_freed_until_it_is_reset": _of("memory", "reset_peak"),
    "test_profiler::test_a_trace_has_the_range_and_the_work_in_it": (
        _of("profiler", "range", lambda *_: contextlib.nullcontext())
    ),
}
"""The test that has to fail -> what plants the fault."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    with Patch.context() as patch:
        FAULTS[f"{item.path.stem}::{item.name}"](patch)
        return (yield)
