"""The cost of workers in processes of their own: a call, tensors each way, their start.

Starts are given as a share of the same number of bare ``import torch`` processes, started at once as the workers
are, in the same run: what is left is rlcore's part.

Workers are children of the program, or on a host of a Ray cluster: the program's own, which such a case starts, or
another one of the cluster at ``RAY_ADDRESS``.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlcore.bench.case import Case, Quantity, Work, expect
from rlcore.bench.cases.timing import Measured, median_time, self_timed
from rlcore.device import Device
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.launch import start_workers
from rlcore.engines.launchers.ray.cluster import connect
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.errors import UnsupportedError
from rlcore.process.python_command import python_code

_OTHER_HOST = "ray_other_host"
"""In the place of a launcher: Ray, with the workers on another host than the program's."""
TIMEOUT_S = 120.0
_TENSOR_BYTES = 256 << 20
_NUM_RUNS = 5
_WARM_UP = 3
_BARE = "import torch; print(torch.__version__, flush=True)"


@contextlib.contextmanager
def worker_processes(
    worker_class: Any, device_names: list[str], timeout_s: float = TIMEOUT_S, *, launcher: str = "process"
) -> Iterator[WorkerGroup]:
    """Worker processes that live as long as a measurement; those of Ray share a cluster."""
    if launcher in ("ray", _OTHER_HOST):
        host = _other_host() if launcher == _OTHER_HOST else connect().hosts()[0].name
        device_names = [f"{host}/{name}" for name in device_names]
        launcher = "ray"
    group = start_workers(worker_class, "the bench", device_names, launcher=launcher, timeout_s=timeout_s)
    try:
        yield group
    finally:
        group.stop()


def _other_host() -> str:
    """Return the name of another host of the cluster at RAY_ADDRESS."""
    if not (address := os.environ.get("RAY_ADDRESS")):
        raise UnsupportedError(
            "a worker on another host",
            "RAY_ADDRESS is not set; start a Ray cluster of two hosts (docs/clusters.md) and set it to its address, "
            "such as 10.0.0.1:6379",
        )
    cluster = connect(address)
    import ray

    own = ray.util.get_node_ip_address()
    if not (others := [host.name for host in cluster.hosts() if host.address != own]):
        raise UnsupportedError("a worker on another host", f"the Ray cluster at {address} has this one, {own}, alone")
    return others[0]


def ask_each(group: WorkerGroup, method: str, *args: Any) -> list[Any]:
    """Call all workers, and return their answers."""
    return group.call(method, [(args, {})] * len(group.workers))


def ask(group: WorkerGroup, method: str, *args: Any) -> Any:
    """Call all workers, and return the answer of the first."""
    return ask_each(group, method, *args)[0]


class BenchWorker:
    """A worker of the bench, which has nothing to close."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.device = context.device

    def close(self) -> None:
        """Do nothing."""


class _Echo(BenchWorker):
    """Answers at once."""

    def echo(self, value: int) -> int:
        return value

    def take(self, tensor: Tensor) -> tuple[int, float, float]:
        """Return the size and the ends of what arrived."""
        return tensor.numel(), float(tensor[0]), float(tensor[-1])

    def make(self, numel: int) -> None:
        self.tensor = torch.arange(numel, dtype=torch.float32)

    def give(self) -> Tensor:
        return self.tensor


def _prepare_call(launcher: str, device: Device) -> Work:
    def run() -> Measured:
        with worker_processes(_Echo, [device.name], launcher=launcher) as group:
            return Measured(*median_time(1000, lambda: ask(group, "echo", 7), warm_up=_WARM_UP))

    return Work((self_timed(launcher, run, _check_echo),), {"workers": 1}, num_runs=_NUM_RUNS)


def _check_echo(answer: int) -> None:
    expect(answer == 7, f"7 came back as {answer!r}")


def _prepare_sending(launcher: str, device: Device) -> Work:
    tensor = torch.arange(_TENSOR_BYTES // 4, dtype=torch.float32)

    def check(arrived: tuple[int, float, float]) -> None:
        expected = (tensor.numel(), float(tensor[0]), float(tensor[-1]))
        expect(arrived == expected, f"{arrived} arrived, not {expected}")

    return _tensor_work(launcher, device, lambda group: ask(group, "take", tensor), check)


def _prepare_receiving(launcher: str, device: Device) -> Work:
    def check(answer: Tensor) -> None:
        expected = torch.arange(_TENSOR_BYTES // 4, dtype=torch.float32)
        expect(torch.equal(answer, expected), "another tensor came back")

    return _tensor_work(launcher, device, lambda group: ask(group, "give"), check)


def _tensor_work(
    launcher: str, device: Device, call: Callable[[WorkerGroup], Any], check: Callable[[Any], None]
) -> Work:
    def run() -> Measured:
        with worker_processes(_Echo, [device.name], launcher=launcher) as group:
            ask(group, "make", _TENSOR_BYTES // 4)
            answer, seconds = median_time(10, lambda: call(group), warm_up=_WARM_UP)
            return Measured(answer, seconds, {"throughput": Quantity(_TENSOR_BYTES / seconds, "byte/s")})

    way = "shared_memory" if launcher == "process" else launcher
    return Work((self_timed(way, run, check),), {"bytes": _TENSOR_BYTES}, num_runs=_NUM_RUNS)


def _bare_imports_s(number: int) -> float:
    """Return the seconds until as many processes that only import torch have all done so."""
    started = time.perf_counter()
    command, environment = python_code(_BARE), os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(number)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    seconds = time.perf_counter() - started
    for process in processes:
        process.communicate(timeout=TIMEOUT_S)
    return seconds


def _prepare_start(launcher: str, num_workers: int, device: Device) -> Work:
    names = [f"{device.spec.name}:{index}" for index in range(num_workers)]
    if launcher != "process":  # the cluster and its agent are there before
        with worker_processes(_Echo, names[:1], launcher=launcher):
            pass

    def run() -> Measured:
        before_s = _bare_imports_s(num_workers)  # and after: what is started first finds colder files and caches
        started = time.perf_counter()
        with worker_processes(_Echo, names, launcher=launcher) as group:
            answer = ask(group, "echo", 7)
            seconds = time.perf_counter() - started
        bare_s = (before_s + _bare_imports_s(num_workers)) / 2
        ratio = Quantity(seconds / bare_s, "1")
        return Measured(answer, seconds, {"bare_import": Quantity(bare_s, "s"), "ratio_to_bare_import": ratio})

    return Work((self_timed(launcher, run, _check_echo),), {"workers": num_workers}, num_runs=_NUM_RUNS)


_PLACES: tuple[tuple[str, str, str], ...] = (
    ("process", "", "a worker process"),
    ("ray", "ray_", "a worker under Ray"),
    (_OTHER_HOST, "ray_other_host_", "a worker on another host of a Ray cluster"),
)

cases = (
    *(
        case
        for launcher, prefix, whose in _PLACES
        for case in (
            Case(f"workers/{prefix}call", f"a call of {whose} and its answer", partial(_prepare_call, launcher)),
            Case(
                f"workers/{prefix}send",
                f"a 256 MiB tensor as an argument of {whose}",
                partial(_prepare_sending, launcher),
            ),
            Case(
                f"workers/{prefix}receive",
                f"a 256 MiB tensor as the answer of {whose}",
                partial(_prepare_receiving, launcher),
            ),
            Case(
                f"workers/{prefix}start_4",
                f"{whose}, four of them at once until all answer, beside four bare imports of torch",
                partial(_prepare_start, launcher, 4),
            ),
        )
    ),
    Case(
        "workers/start_1",
        "one worker process until it answers, beside a bare import of torch",
        partial(_prepare_start, "process", 1),
    ),
)
