"""Faults of processes: what strikes a worker, or what the user's code does in it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlcore.chaos.engines import SHORT_S
from rlcore.chaos.strike import Strike, send_signal, soon
from rlcore.engines.launchers import worker_process

CLOSE_S = 40.0
"""The longest that close() may take on a busy machine: five seconds for workers to end, and what follows a kill."""


@contextlib.contextmanager
def nothing(strike: Strike) -> Iterator[None]:
    strike.act()
    yield


@contextlib.contextmanager
def kill(strike: Strike) -> Iterator[None]:
    if strike.step == "build":
        with _kill_at_start(strike):
            yield
        return
    worker = strike.victim()
    with strike.at_a_moment(partial(send_signal, worker.process_id, signal.SIGKILL)):
        yield


@contextlib.contextmanager
def _kill_at_start(strike: Strike) -> Iterator[None]:
    """Kill the first worker process that starts."""
    strike.engines.close()
    earlier = set(_worker_processes())
    delay_s = strike.draw.random() * 3
    strike.words = f"the first worker {delay_s:.2f} s after its process was there"
    strike.device = strike.engines.layout.trainers[0]
    is_over = threading.Event()

    def kill() -> None:
        while not (found := [pid for pid in _worker_processes() if pid not in earlier]):
            if is_over.wait(0.01):
                return
        is_over.wait(delay_s)
        strike.act()
        send_signal(found[0], signal.SIGKILL)

    with soon(0.0, kill):
        try:
            yield
        finally:
            is_over.set()


def _worker_processes() -> list[int]:
    return [process.pid for process in list(worker_process._processes.values())]


@contextlib.contextmanager
def stop(strike: Strike) -> Iterator[None]:
    worker = strike.victim()
    strike.engines.be_patient(SHORT_S if strike.step != "close" else 2 * CLOSE_S)
    with strike.at_a_moment(partial(send_signal, worker.process_id, signal.SIGSTOP)):
        yield


@contextlib.contextmanager
def user_exception(strike: Strike) -> Iterator[None]:
    rank = strike.draw.randrange(len(strike.engines.layout.trainers))
    num_passes = strike.draw.randrange(2)
    strike.words, strike.rank = f"in forward pass {num_passes} of rank {rank}", rank
    strike.device = strike.engines.layout.trainers[rank]
    strike.engines.train.call("fail_in", rank, num_passes)
    strike.act()
    yield


@contextlib.contextmanager
def closed_descriptors(strike: Strike) -> Iterator[None]:
    """Let the user's code close what it has not opened."""
    worker = strike.victim()
    strike.act()
    strike.engines.train.call("run", _close_descriptors, worker.context.rank)
    yield


def _close_descriptors(module: Any, rank: int) -> None:
    here = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if here == rank:
        os.closerange(3, 1 << 16)


@contextlib.contextmanager
def no_memory(strike: Strike) -> Iterator[None]:
    strike.words, strike.device = "1 GiB where 64 MiB are left", strike.engines.layout.trainers[0]
    strike.act()
    strike.engines.train.call("run", _allocate, 0)
    yield


def _allocate(module: Any, rank: int) -> None:
    here = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if here != rank:
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), before[1]))
    try:
        torch.empty(1 << 30, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
