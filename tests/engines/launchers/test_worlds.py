"""Workers of several engines in one process, each with process groups of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.inline import InlineWorker
from rlcore.engines.launchers.worker import WorkerContext
from tests.engines.ask import ask_all

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the child cannot import this file

Start = Callable[..., AbstractContextManager[WorkerGroup]]


class Worker:
    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def world(self) -> tuple[int, int] | None:
        """(rank, size) in the default group, if there is one."""
        return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None

    def join(self) -> str:
        """Name of the default group, made at the first call."""
        return str(self.context.process_group(60.0).group_name)

    def add_up(self, value: float) -> float:
        total = torch.tensor(value)
        dist.all_reduce(total)
        return float(total)

    def make_subgroups(self) -> None:
        self.pairs = [dist.new_group([0, 1]), dist.new_group([1, 0])]

    def add_up_in_subgroups(self, value: float) -> list[float]:
        totals = [torch.tensor(value * (index + 1)) for index in range(2)]
        for total, group in zip(totals, self.pairs, strict=True):
            dist.all_reduce(total, group=group)
        return [float(total) for total in totals]

    def close(self) -> None:
        pass


@pytest.fixture
def two_engines(join_group: Start) -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    """They share both processes, and in each have another rank."""
    with join_group(Worker, 2) as one, join_group(Worker, devices=["cpu:5", "cpu:4"]) as other:
        yield one, other


def test_a_worker_has_no_group_until_it_asks_for_one(two_engines: tuple[WorkerGroup, WorkerGroup]) -> None:
    low, high = two_engines
    ask_all(low, "join")
    assert ask_all(low, "world") == [(0, 2), (1, 2)]
    assert ask_all(high, "world") == [None, None]
    ask_all(high, "join")
    assert ask_all(high, "world") == [(0, 2), (1, 2)]


def test_the_group_is_made_once(two_engines: tuple[WorkerGroup, WorkerGroup]) -> None:
    low, high = two_engines
    names = [*ask_all(low, "join"), *ask_all(high, "join"), *ask_all(low, "join"), *ask_all(high, "join")]
    assert names[:4] == names[4:]
    assert names[0] == names[1] != names[2] == names[3]


def test_collectives_of_engines_that_share_a_process_do_not_cross(two_engines: tuple[WorkerGroup, WorkerGroup]) -> None:
    low, high = two_engines
    for engine in (high, low):
        ask_all(engine, "join")
        ask_all(engine, "make_subgroups")
    for _ in range(3):
        assert low.call("add_up", [((1.0,), {}), ((2.0,), {})]) == [3.0, 3.0]
        assert high.call("add_up", [((10.0,), {}), ((20.0,), {})]) == [30.0, 30.0]
        assert ask_all(low, "add_up_in_subgroups", 1.0) == [[2.0, 4.0]] * 2
        assert ask_all(high, "add_up_in_subgroups", 5.0) == [[10.0, 20.0]] * 2


def test_an_engine_that_closes_destroys_its_own_groups_only(join_group: Start) -> None:
    with join_group(Worker, 2) as stays:
        with join_group(Worker, 2) as leaves:
            for engine in (stays, leaves):
                ask_all(engine, "join")
                ask_all(engine, "make_subgroups")
        assert ask_all(stays, "add_up", 1.0) == [2.0, 2.0]
        assert ask_all(stays, "add_up_in_subgroups", 1.0) == [[2.0, 4.0]] * 2
        with join_group(Worker, 2) as follows:
            assert ask_all(follows, "world") == [None, None]
            ask_all(follows, "join")
            assert ask_all(follows, "add_up", 2.0) == [4.0, 4.0]


def test_the_users_own_default_group_is_out_of_sight_of_an_inline_worker() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        users = dist.group.WORLD
        worker = InlineWorker(Worker, WorkerContext("the test engine", 0, 1, "cpu:0", 1))
        assert worker.call("world").result() is None
        name = worker.call("join").result()
        assert dist.group.WORLD is users and users.group_name != name
        assert worker.call("add_up", 3.0).result() == 3.0
        worker.ask_to_stop()
        assert dist.group.WORLD is users
        dist.barrier()
    finally:
        dist.destroy_process_group()
