"""What it costs to have workers in processes of their own: a call, tensors each way, their start.

Starts are given as a share of the same number of bare ``import torch`` processes, started at once as the workers
are, in the same run: what is left is rlcore's part.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.worker_processes import TIMEOUT_S, ask, worker_processes
from rlcore.device import Device
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.worker import WorkerContext

_TENSOR_BYTES = 256 << 20
_NUM_RUNS = 5
_WARM_UP = 3
_BARE = "import torch; print(torch.__version__, flush=True)"


class _Worker:
    """Answers at once."""

    def __init__(self, context: WorkerContext) -> None:
        pass

    def echo(self, value: int) -> int:
        return value

    def take(self, tensor: Tensor) -> tuple[int, float, float]:
        """What arrived."""
        return tensor.numel(), float(tensor[0]), float(tensor[-1])

    def make(self, numel: int) -> None:
        self.tensor = torch.arange(numel, dtype=torch.float32)

    def give(self) -> Tensor:
        return self.tensor

    def close(self) -> None:
        pass


def _started(device: Device, num_workers: int) -> AbstractContextManager[WorkerGroup]:
    return worker_processes(_Worker, [f"{device.spec.name}:{index}" for index in range(num_workers)])


class _Timed(NamedTuple):
    answer: Any
    seconds: float


def _median_of(number: int, function: Callable[[], Any]) -> _Timed:
    """The last answer, and the median of the times; the first calls are not counted."""
    seconds = []
    for _ in range(number + _WARM_UP):
        started = time.perf_counter()
        answer = function()
        seconds.append(time.perf_counter() - started)
    return _Timed(answer, statistics.median(seconds[_WARM_UP:]))


def _prepare_call(device: Device) -> Work:
    def run() -> _Timed:
        with _started(device, 1) as group:
            return _median_of(1000, lambda: ask(group, "echo", 7))

    def check(done: _Timed) -> None:
        expect(done.answer == 7, f"7 came back as {done.answer!r}")

    contender = Contender(implementation="process", run=run, check=check, seconds=lambda done: float(done.seconds))
    return Work(contenders=(contender,), params={"workers": 1}, num_runs=_NUM_RUNS)


def _prepare_sending(device: Device) -> Work:
    tensor = torch.arange(_TENSOR_BYTES // 4, dtype=torch.float32)

    def run() -> _Timed:
        with _started(device, 1) as group:
            return _median_of(10, lambda: ask(group, "take", tensor))

    def check(done: _Timed) -> None:
        expected = (tensor.numel(), float(tensor[0]), float(tensor[-1]))
        expect(done.answer == expected, f"{done.answer} arrived, not {expected}")

    return _tensor_work(run, check)


def _prepare_receiving(device: Device) -> Work:
    def run() -> _Timed:
        with _started(device, 1) as group:
            ask(group, "make", _TENSOR_BYTES // 4)
            return _median_of(10, lambda: ask(group, "give"))

    def check(done: _Timed) -> None:
        expected = torch.arange(_TENSOR_BYTES // 4, dtype=torch.float32)
        expect(torch.equal(done.answer, expected), "another tensor came back")

    return _tensor_work(run, check)


def _tensor_work(run: Callable[[], _Timed], check: Callable[[_Timed], None]) -> Work:
    contender = Contender(
        implementation="shared_memory",
        run=run,
        check=check,
        seconds=lambda done: float(done.seconds),
        quantities=lambda done: {"throughput": Quantity(_TENSOR_BYTES / done.seconds, "byte/s")},
    )
    return Work(contenders=(contender,), params={"bytes": _TENSOR_BYTES}, num_runs=_NUM_RUNS)


class _Start(NamedTuple):
    answer: int
    seconds: float
    bare_s: float


def _bare_imports(number: int) -> float:
    """Seconds until as many processes that only import torch have all done so."""
    started = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", _BARE], stdout=subprocess.PIPE, env=environment) for _ in range(number)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    seconds = time.perf_counter() - started
    for process in processes:
        process.communicate(timeout=TIMEOUT_S)
    return seconds


def _prepare_start(num_workers: int, device: Device) -> Work:
    def run() -> _Start:
        # Before and after: what is started first finds colder files and caches.
        before_s = _bare_imports(num_workers)
        started = time.perf_counter()
        with _started(device, num_workers) as group:
            answer = ask(group, "echo", 7)
            seconds = time.perf_counter() - started
        return _Start(answer, seconds, (before_s + _bare_imports(num_workers)) / 2)

    def check(done: _Start) -> None:
        expect(done.answer == 7, "the workers do not answer")

    contender = Contender(
        implementation="process",
        run=run,
        check=check,
        seconds=lambda done: float(done.seconds),
        quantities=lambda done: {
            "bare_import": Quantity(done.bare_s, "s"),
            "ratio_to_bare_import": Quantity(done.seconds / done.bare_s, "1"),
        },
    )
    return Work(contenders=(contender,), params={"workers": num_workers}, num_runs=_NUM_RUNS)


call_case = Case(name="workers/call", description="a call of a worker process and its answer", prepare=_prepare_call)
sending_case = Case(
    name="workers/send", description="a 256 MiB tensor as an argument of a worker process", prepare=_prepare_sending
)
receiving_case = Case(
    name="workers/receive", description="a 256 MiB tensor as the answer of a worker process", prepare=_prepare_receiving
)
start_one_case = Case(
    name="workers/start_1",
    description="one worker process until it answers, beside a bare import of torch",
    prepare=lambda device: _prepare_start(1, device),
)
start_four_case = Case(
    name="workers/start_4",
    description="four worker processes at once until all answer, beside four bare imports of torch",
    prepare=lambda device: _prepare_start(4, device),
)
