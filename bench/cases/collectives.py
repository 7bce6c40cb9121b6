"""Collectives of torch.distributed over one worker process a device, from 8 bytes to 1 GiB.

S bytes are those of one rank's tensor, for all-gather and reduce-scatter of the whole one. Algorithm bandwidth is
S / t; bus bandwidth multiplies it by what each rank must send: 2 (n-1)/n for all-reduce, (n-1)/n for all-gather,
reduce-scatter and all-to-all, 1 for broadcast, as in nccl-tests. t is the slowest rank's, iteration by iteration.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.timing import Measured, self_timed
from rlcore.bench.cases.workers import BenchWorker
from rlcore.device import Device
from rlcore.engines.launchers.launch import start_workers
from rlcore.errors import UnsupportedError

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]

_TIMEOUT_S = 300.0
_SMALL = tuple(8 << exponent for exponent in range(0, 24, 3))
"""8 B to 16 MiB, eightfold each."""
_LARGE = (128 << 20, 1 << 30)
_HOST_LARGEST = 128 << 20
_HOST_RANKS = 2
_NUM_RUNS = 5
"""Runs of so many iterations each, before which there is one more to warm up."""
_ITERATIONS, _FEW_ITERATIONS, _FEW_FROM = 20, 3, 16 << 20


class _Rank(BenchWorker):
    """Does a collective many times; all ranks do the same."""

    def measure(self, op: Op, nbytes: int, iterations: int) -> tuple[list[float], bool]:
        """Return the seconds of each iteration, and whether the result is right."""
        import torch.distributed as dist

        group = self.context.process_group(_TIMEOUT_S)
        rank, size, device = self.context.rank, self.context.world_size, self.context.device
        numel = max(1, nbytes // 4 // size) * size
        part = numel // size
        at: dict[str, Any] = {"device": device.torch_device}
        # Rank r holds r + 1 everywhere, so that every result is known.
        sent = torch.full((part if op == "all_gather" else numel,), float(rank + 1), **at)
        received = torch.zeros(part if op == "reduce_scatter" else numel, **at)
        calls = {
            "all_reduce": lambda: dist.all_reduce(received, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(received, sent, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(received, sent, group=group),
            "broadcast": lambda: dist.broadcast(received, 0, group=group),
            "all_to_all": lambda: dist.all_to_all_single(received, sent, group=group),
        }
        seconds = []
        for _ in range(iterations + 1):
            if op in ("all_reduce", "broadcast"):  # in place
                received.copy_(sent)
            dist.barrier(group=group)
            device.synchronize()
            started = time.perf_counter()
            calls[op]()
            device.synchronize()
            seconds.append(time.perf_counter() - started)
        return seconds[1:], torch.equal(received, _expected(op, numel, size).to(device.torch_device))


def _expected(op: Op, numel: int, size: int) -> Tensor:
    total = size * (size + 1) / 2
    if op == "all_reduce":
        return torch.full((numel,), total)
    if op == "reduce_scatter":
        return torch.full((numel // size,), total)
    if op == "broadcast":
        return torch.ones(numel)
    return torch.arange(1.0, size + 1).repeat_interleave(numel // size)  # a part of each rank


def bus_factor(op: Op, size: int) -> float:
    """Return the bytes that each rank must send, for each byte of S."""
    return {"all_reduce": 2 * (size - 1) / size, "broadcast": 1.0}.get(op, (size - 1) / size)


def _prepare(op: Op, is_large: bool, device: Device) -> Work:
    ranks = _HOST_RANKS if device.spec.is_host else device.count()
    sizes = tuple(
        nbytes for nbytes in (_LARGE if is_large else _SMALL) if nbytes <= _HOST_LARGEST or not device.spec.is_host
    )
    if ranks < 2:
        raise UnsupportedError("a collective", f"there is one {device.spec.name} device")
    names = [f"{device.spec.name}:{index}" for index in range(ranks)]
    group = start_workers(_Rank, "the bench", names, launcher="process", timeout_s=_TIMEOUT_S)
    backend = device.collectives.backend

    def run(nbytes: int) -> Measured:
        iterations = _FEW_ITERATIONS if nbytes >= _FEW_FROM else _ITERATIONS
        found = group.call("measure", [((op, nbytes, iterations), {})] * ranks)
        return _measured(nbytes, bus_factor(op, ranks), *zip(*found, strict=True))

    def contender(nbytes: int) -> Contender:
        need = {"link": max(1, round(nbytes * bus_factor(op, ranks)))}
        return self_timed(backend, functools.partial(run, nbytes), _check, params={"bytes": nbytes}, limits=need)

    return Work(
        tuple(map(contender, sizes)),
        {"op": op, "devices": ranks, "dtype": "float32"},
        close=group.stop,
        num_runs=_NUM_RUNS,
    )


def _check(is_right: Sequence[bool]) -> None:
    wrong = [rank for rank, one in enumerate(is_right) if not one]
    expect(not wrong, f"a wrong result arrived at rank {wrong}")


def _measured(nbytes: int, factor: float, seconds: Sequence[list[float]], is_right: Sequence[bool]) -> Measured:
    """Return the time of the slowest rank, from the seconds that each saw of each iteration."""
    times = np.array(seconds)
    slowest = times.max(axis=0)
    median = float(np.median(slowest))
    quantities = {
        "p99": Quantity(float(np.percentile(slowest, 99, method="nearest")), "s"),
        "algorithm_bandwidth": Quantity(nbytes / median, "B/s"),
        "bus_bandwidth": Quantity(nbytes * factor / median, "B/s"),
        "slowest_to_fastest_rank": Quantity(float(np.median(slowest / times.min(axis=0))), "1"),
    }
    return Measured(is_right, median, quantities)


def _case(op: Op, *, is_large: bool) -> Case:
    span = "128 MiB and 1 GiB (on a host the first)" if is_large else "8 B to 16 MiB"
    return Case(
        f"collectives/{op}{'_large' * is_large}",
        f"{op.replace('_', '-')} of {span} over all devices",
        functools.partial(_prepare, op, is_large),
        effort="full" if is_large else "standard",
        estimate_s=12.0,
        timeout_s=900.0,
    )


cases = tuple(_case(op, is_large=is_large) for is_large in (False, True) for op in get_args(Op))
