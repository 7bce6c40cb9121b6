"""The thread that waits for the work of one pair of ranks: it is kept, tells errors, and ends with its owner."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta
from typing import Any

import torch

from rlcore.collectives.waiting_thread import WaitingThread
from tests.warm import LIMIT_S

NAME = "rlcore-collective-wait"


class Work:
    """Stands in for gloo's: ends when it is told to, as it is told to."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.ends = threading.Event()
        self.thread: threading.Thread | None = None

    def wait(self, timeout: timedelta) -> None:
        self.thread = threading.current_thread()
        assert self.ends.wait(timeout.total_seconds())
        if self.error:
            raise RuntimeError(self.error)


def ended(error: str = "") -> Work:
    work = Work(error)
    work.ends.set()
    return work


def wait_in(thread: WaitingThread, work: Work) -> threading.Thread:
    thread.begin(work, LIMIT_S)
    assert thread.is_done(LIMIT_S)
    assert work.thread is not None
    return work.thread


def test_one_thread_waits_for_one_work_after_the_other_and_tells_the_error_of_each() -> None:
    thread = WaitingThread()
    first = wait_in(thread, ended())
    assert thread.error is None
    assert wait_in(thread, ended("connection lost")) is first
    assert str(thread.error) == "connection lost"
    assert wait_in(thread, ended()) is first
    assert thread.error is None
    thread.end()
    first.join(LIMIT_S)
    assert not first.is_alive()


def test_work_that_goes_on_is_not_done_and_its_thread_ends_after_it() -> None:
    thread, work = WaitingThread(), Work()
    thread.begin(work, LIMIT_S)
    assert not thread.is_done(0.01)
    thread.end()
    work.ends.set()
    assert thread.is_done(LIMIT_S)
    assert work.thread is not None
    work.thread.join(LIMIT_S)
    assert not work.thread.is_alive()


def test_a_thread_ends_with_its_owner() -> None:
    thread = WaitingThread()
    served = wait_in(thread, ended())
    del thread
    gc.collect()
    served.join(LIMIT_S)
    assert not served.is_alive()


def waiting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def send_often(rank: Any) -> tuple[int, int]:
    others = set(waiting_threads())  # of groups that other tests keep
    group = rank.new_group("cpu", 2, "often", timeout_s=90.0)
    for number in range(5):
        if rank.rank == 0:
            group.send(torch.full((3,), float(number)), 1)
        else:
            assert group.recv(torch.empty(3), 0).tolist() == [number] * 3
    kept = set(waiting_threads()) - others
    group.destroy()
    for thread in kept:
        thread.join(LIMIT_S)
    return len(kept), len(set(waiting_threads()) - others)


def test_a_group_keeps_one_thread_for_its_sends_until_it_is_destroyed(on_ranks: Any) -> None:
    assert on_ranks(send_often, 2) == [(1, 0), (1, 0)]


def send_side_by_side(rank: Any) -> list[float]:
    """Each sends in one thread and receives in another, as programs do that swap large tensors."""
    group = rank.new_group("cpu", 2, "side-by-side", timeout_s=90.0)
    group.send(torch.ones(1 << 20), 1) if rank.rank == 0 else group.recv(torch.ones(1 << 20), 0)  # agreed on, one way
    group.recv(torch.ones(1 << 20), 1) if rank.rank == 0 else group.send(torch.ones(1 << 20), 0)  # and the other
    other, own = 1 - rank.rank, torch.full((1 << 20,), float(rank.rank))
    got = torch.empty_like(own)
    sender = threading.Thread(target=group.send, args=(own, other))
    sender.start()
    group.recv(got, other)
    sender.join(LIMIT_S)
    group.destroy()
    return [got.min().item(), got.max().item()]


def test_two_threads_of_a_rank_wait_side_by_side(on_ranks: Any) -> None:
    assert on_ranks(send_side_by_side, 2) == [[1.0, 1.0], [0.0, 0.0]]
