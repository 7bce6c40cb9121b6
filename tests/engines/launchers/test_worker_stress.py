"""Workers that are killed, stopped and made to fail at random moments, again and again; calls by the thousand."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from rlcore.engines.launchers.launch import start_workers
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.errors import WorkerDiedError, WorkerError, WorkerTimeoutError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the child cannot import this file

MISSED_S = 4.0
"""The deadline of a call that is to miss it."""
KEPT_S = 100.0
"""The deadline of others, on however busy a machine."""
RIGHT: dict[str, type[WorkerError]] = {"kill": WorkerDiedError, "stop": WorkerTimeoutError, "raise": WorkerError}
ACCIDENTS = [(what, when) for what in RIGHT for when in ("start", "call", "close")]
UNHEARD = [("kill", "start"), ("stop", "start"), ("kill", "close"), ("stop", "close"), ("raise", "close")]
"""Accidents that nobody need hear of: they may come when the last answer is there, or are a warning in the log."""


class PlantedError(Exception):
    pass


class Worker:
    def __init__(self, context: WorkerContext, fails: bool = False) -> None:
        if fails:
            raise PlantedError
        self.context = context

    def work(self, tensor: torch.Tensor, fails: bool) -> float:
        time.sleep(0.05)
        if fails:
            raise PlantedError
        return float(tensor.sum())

    def echo(self, value: Any) -> Any:
        return value

    def close(self) -> None:
        pass


class FailsToStart(Worker):
    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context, fails=context.rank == 0)


class FailsToClose(Worker):
    def close(self) -> None:
        raise PlantedError


def own_children() -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def strike_soon(pid: int, number: signal.Signals, after_s: float) -> threading.Thread:
    def strike() -> None:
        time.sleep(after_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    thread = threading.Thread(target=strike)
    thread.start()
    return thread


def strike_children_soon(number: signal.Signals, after_s: float) -> threading.Thread:
    """The first worker process that appears, ``after_s`` later."""
    earlier = set(own_children())

    def strike() -> None:
        deadline = time.monotonic() + KEPT_S
        while not (children := [pid for pid in own_children() if pid not in earlier]) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(after_s)
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(children[0], number)

    thread = threading.Thread(target=strike)
    thread.start()
    return thread


def one_accident(what: str, when: str, rng: random.Random, num_workers: int) -> str:
    """Something happens at a random moment of start, call or close; return the name of the error."""
    number = signal.SIGKILL if what == "kill" else signal.SIGSTOP
    timeout_s = KEPT_S
    kind: Any = FailsToStart if (what, when) == ("raise", "start") else Worker
    kind = FailsToClose if (what, when) == ("raise", "close") else kind
    # A worker that is stopped while it starts is only missed at the deadline, by which no other must be late.
    if (what, when) == ("stop", "start"):
        num_workers, timeout_s = 1, 2 * MISSED_S
    names = [f"cpu:{index}" for index in range(num_workers)]
    accident: threading.Thread | None = None
    outcome, group = "", None
    try:
        if when == "start" and what != "raise":
            accident = strike_children_soon(number, rng.random() * 1.5)
        group = start_workers(kind, "the engine", names, launcher="process", timeout_s=timeout_s)
        group._timeout_s = MISSED_S if what == "stop" and when != "close" else KEPT_S
        if when == "call" and what != "raise":
            accident = strike_soon(group.workers[-1].process_id, number, rng.random() * 0.05)
        tensor = torch.ones(rng.choice([10, 100_000]))
        fails = (what, when) == ("raise", "call")
        is_over = False
        while not is_over:
            is_over = when != "call" or accident is None or not accident.is_alive()
            group.call("work", [((tensor, fails and rank == 0), {}) for rank in range(num_workers)])
        if when == "close" and what != "raise":
            accident = strike_soon(group.workers[0].process_id, number, rng.random() * 0.02)
            time.sleep(rng.random() * 0.02)
    except WorkerError as error:
        outcome = type(error).__name__
        assert type(error) is RIGHT[what], f"{what} during {when}: {error!r}"
        # While it starts, a process may be past its start when it is struck: then the first call says so.
        assert error.method in (("start", "work") if when == "start" else ("work",))
        assert error.rank == (num_workers - 1 if when == "call" and what != "raise" else 0)
    finally:
        if accident is not None:
            accident.join()
        if group is not None:
            began = time.monotonic()
            group.stop()
            assert time.monotonic() - began < KEPT_S
    assert outcome or (what, when) in UNHEARD, f"{what} during {when} went unnoticed"
    return outcome


def left_of(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


TIMES = 2
"""How often each accident comes. One more costs about 20 s: who is stopped is waited for."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_accidents_at_random_moments_leave_nothing_and_are_named_rightly(holdings: Any, wait_until: Any) -> None:
    rng = random.Random(1)
    one_accident("raise", "call", rng, 2)
    wait_until(lambda: holdings()["processes"] == [])
    before = holdings()
    accidents = rng.sample(ACCIDENTS * TIMES, len(ACCIDENTS) * TIMES)
    outcomes = set()
    for index, (what, when) in enumerate(accidents):
        outcomes.add(one_accident(what, when, rng, 1 + index % 3))
        try:
            wait_until(lambda: holdings() == before)
        except AssertionError:
            raise AssertionError(f"left after {what} during {when}: {left_of(before, holdings())}") from None
    assert outcomes == {"", *(kind.__name__ for kind in RIGHT.values())}


NUM_CALLS = 1_000


def test_calls_do_not_grow_memory_or_descriptors(join_group: Any) -> None:
    def resident(pid: int) -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def descriptors(pid: int) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    with join_group(Worker) as group:
        pids = [os.getpid(), group.workers[0].process_id]
        small, large = torch.ones(10), torch.ones(200_000)

        def call(number: int) -> None:
            for index in range(number):
                tensor = large if index % 10 == 0 else small
                (back,) = group.call("echo", [(({"step": index, "tensor": tensor},), {})])
                assert back["step"] == index and back["tensor"].shape == tensor.shape

        call(500)  # allocators and pools fill
        for _ in range(3):  # what leaks grows every time; what else this process does may come once
            before = [(resident(pid), descriptors(pid)) for pid in pids]
            call(NUM_CALLS)
            now = [(resident(pid), descriptors(pid)) for pid in pids]
            grown = [(one[0] - was[0], one[1] - was[1]) for one, was in zip(now, before, strict=True)]
            if all(memory < 16 << 20 and files <= 0 for memory, files in grown):
                break
        else:
            pytest.fail(f"each {NUM_CALLS} calls left (bytes, descriptors) in this process and the worker: {grown}")
