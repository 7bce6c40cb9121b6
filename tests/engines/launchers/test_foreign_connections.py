"""Other users connect to the listeners that gloo opens in workers, which would end them when descriptors run out."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.errors import WorkerDiedError
from rlcore.process.tcp_sockets import LISTEN, own_sockets, tcp_sockets
from tests.strangers import ANOTHER_USER, connected, filters_sockets

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the child cannot import this file

Start = Callable[..., AbstractContextManager[WorkerGroup]]


class Worker:
    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def join(self) -> list[tuple[str, int]]:
        self.context.process_group(60.0)
        return self.listeners()

    def join_mesh(self) -> list[tuple[str, int]]:
        """As the trainer does."""
        self.context.process_group(60.0)
        self.mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
        self.context.close_listeners(60.0)
        return self.listeners()

    def add_up_over_the_mesh(self, value: float) -> float:
        total = torch.tensor(value)
        dist.all_reduce(total, group=self.mesh.get_group("shard"))
        return float(total)

    def open_listener(self) -> list[tuple[str, int]]:
        """As a group does until its ranks are connected."""
        self.device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        return self.listeners()

    def listeners(self) -> list[tuple[str, int]]:
        own = own_sockets()
        return [tuple(one.local) for one in tcp_sockets() if one.state == LISTEN and one.inode in own]  # type: ignore[misc]

    def add_up(self, value: float) -> float:
        total = torch.tensor(value)
        dist.all_reduce(total)
        return float(total)

    def add_up_in_a_new_group(self, value: float) -> float:
        total = torch.tensor(value)
        dist.all_reduce(total, group=dist.new_group([0, 1]))
        return float(total)

    def leave_descriptors(self, count: int) -> tuple[int, int]:
        """Set a limit that leaves ``count`` more; return the limits that were."""
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.num_open() + count, before[1]))
        return before

    def restore(self, limits: tuple[int, int]) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, tuple(limits))

    def num_sockets(self) -> int:
        """Not all descriptors: the watch of the worker opens one now and then, to count them."""
        return len(own_sockets())

    def num_open(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def sleep(self) -> None:
        time.sleep(600)

    def close(self) -> None:
        pass


def ask(group: WorkerGroup, method: str, *args: Any) -> list[Any]:
    return group.call(method, [(args, {})] * len(group.workers))


def opened_by(group: WorkerGroup, method: str) -> list[set[tuple[str, int]]]:
    """Call the method; return each worker's new listeners. Their processes may hold those of earlier tests."""
    before = [set(map(tuple, found)) for found in ask(group, "listeners")]
    return [set(map(tuple, found)) - old for found, old in zip(ask(group, method), before, strict=True)]


@filters_sockets
def test_a_group_of_workers_outlives_thousands_of_connections(join_group: Start) -> None:
    with join_group(Worker, 2) as group:
        (listener,), _ = opened_by(group, "join")
        limits, num_sockets = ask(group, "leave_descriptors", 300), ask(group, "num_sockets")
        try:
            with connected(listener, 3000):
                assert ask(group, "add_up", 1.0) == [2.0, 2.0]
                assert ask(group, "num_sockets") == num_sockets
                assert ask(group, "add_up_in_a_new_group", 2.0) == [4.0, 4.0]
        finally:
            ask(group, "restore", limits[0])


@filters_sockets
def test_the_groups_of_a_mesh_outlive_thousands_of_connections(join_group: Start) -> None:
    with join_group(Worker, 2) as group:
        listeners, _ = opened_by(group, "join_mesh")
        assert len(listeners) > 1, "the mesh has groups of its own"
        limits, num_sockets = ask(group, "leave_descriptors", 300), ask(group, "num_sockets")
        try:
            for listener in listeners:
                with connected(listener, 1000):
                    assert ask(group, "add_up_over_the_mesh", 1.0) == [2.0, 2.0]
                    assert ask(group, "num_sockets") == num_sockets
        finally:
            ask(group, "restore", limits[0])


def test_a_worker_warns_before_it_has_no_descriptor_left(
    join_group: Start, wait_until: Any, errors: io.StringIO
) -> None:
    is_root = os.geteuid() == 0
    with join_group(Worker) as group:
        ((listener,),) = opened_by(group, "open_listener")
        (num_open,) = ask(group, "num_open")
        (limits,) = ask(group, "leave_descriptors", num_open + 300)
        try:
            with connected(listener, 200, user=ANOTHER_USER if is_root else os.getuid()):
                wait_until(lambda: "descriptors that this process may have are in use" in errors.getvalue())
        finally:
            ask(group, "restore", limits)
    said = errors.getvalue()
    assert not is_root or f"(user id {ANOTHER_USER}) to this process's listener 127.0.0.1:{listener[1]}" in said


@pytest.mark.slow
def test_a_worker_that_runs_out_of_descriptors_says_so(start_group: Start) -> None:
    """It may have as many as there may be, however few the user's process has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 900), hard))
        try:
            group = stack.enter_context(start_group(Worker))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        ((listener,),) = opened_by(group, "open_listener")
        most = 1 << 20 if hard == resource.RLIM_INFINITY else min(hard, 1 << 20)
        assert [tuple(limits) for limits in ask(group, "leave_descriptors", 50)] == [(most, hard)]
        call = group.workers[0].call("sleep")
        with connected(listener, 3000), pytest.raises(WorkerDiedError) as caught:
            call.result(60)
    said = str(caught.value)
    assert "was killed by SIGABRT ([enforce fail at" in said and "accept: Too many open files)" in said
    assert any("raise the hard limit (ulimit -Hn)" in note for note in caught.value.__notes__)
