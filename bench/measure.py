"""Measure one case in this process: warm up until stable, check, then time the contenders in turns.

Contenders take turns sample by sample, so that a machine that slows down slows all of them. The first run (imports,
compilation, autotuning) is reported apart. A sample of something shorter than the clock resolves is the mean over
several runs; how many is recorded. Single runs find a cold cache. A case of minutes states its number of runs instead.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rlcore.bench.case import Case, Contender, Quantity, Work
from rlcore.bench.result import CaseResult, Metric, Status
from rlcore.bench.telemetry import Monitor, marks
from rlcore.errors import DeviceError, MissingDependencyError, UnsupportedError

_FLUSH_BYTES = 256 << 20
"""More than the last cache of any accelerator known here; as in triton.testing.do_bench."""
_HOST_FLUSH_BYTES = 32 << 20
"""More than the caches of the cores; those that sockets share hold more, and take too long to overwrite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How much to measure in one process."""

    min_samples: int = 10
    max_samples: int = 30
    """Between the two, sampling ends when ``budget_s`` is used up."""
    budget_s: float = 5.0
    """Wall time for all samples of one contender."""
    max_warmup: int = 20
    shortest_sample_s: float = 200e-6
    """Runs are joined into samples of at least this; the clock and the call cost about 1e-6 s."""
    stable_spread: float = 0.1
    """Warm-up ends when the last three runs lie within this share of their median."""
    energy_s: float = 0.0
    """How long to run each contender again for its energy, where a counter exists; 0: not at all."""


def run_case(case: Case, device: Any, sampling: Sampling | None = None) -> list[CaseResult]:
    """One result for each contender, in their order; whatever goes wrong is a status with its reason."""
    sampling = sampling or Sampling()
    monitor = Monitor(device)
    device.activate()
    try:
        work = case.prepare(device)
    except Exception as error:  # a case is a plugin's code; the reader of the record sees the error
        return [_not_measured(case.name, "", {}, _failure(error))]
    try:
        return _measure(case, work, device, sampling, monitor)
    finally:
        if work.close is not None:
            work.close()


def _measure(case: Case, work: Work, device: Any, sampling: Sampling, monitor: Monitor) -> list[CaseResult]:
    flush = _Flush(device)
    trials = [_Trial(contender, device, sampling, work.num_runs, flush) for contender in work.contenders]
    for trial in trials:
        if work.num_runs is None:
            trial.attempt(trial.warm_up)
    for trial in _in_turns(trials):
        trial.attempt(trial.sample)
        monitor.read()
    for trial in trials:
        trial.attempt(trial.check_last)
        if sampling.energy_s and work.num_runs is None:
            trial.attempt(lambda trial=trial: trial.measure_energy(monitor))
    return [_result(case, work, trial, monitor) for trial in trials]


def _in_turns(trials: list[_Trial]) -> Iterator[_Trial]:
    while active := [trial for trial in trials if trial.wants_more]:
        yield from active


class _Flush:
    """Overwrites the caches; its memory is taken when it is first used."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._buffer: torch.Tensor | None = None

    def __call__(self) -> None:
        if self._buffer is None:
            nbytes = _HOST_FLUSH_BYTES if self._device.spec.is_host else _FLUSH_BYTES
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch_device)
        self._buffer.zero_()


class _Trial:
    """One contender being measured."""

    def __init__(
        self, contender: Contender, device: Any, sampling: Sampling, num_runs: int | None, flush: _Flush
    ) -> None:
        self.contender = contender
        self.device = device
        self.sampling = sampling
        self.num_runs = num_runs
        self.first_run_s: float | None = None
        self.num_warmup = 0
        self.runs_per_sample = 1
        self.samples: list[float] = []
        self.own_samples: dict[str, list[float]] = {}
        """By the name of a clock beside the host's."""
        self.quantities: dict[str, list[Quantity]] = {}
        self.failure: _Failure | None = None
        self._flush = flush
        self._output: Any = None
        self._own: dict[str, float] = {}
        self._spent_s = 0.0

    def attempt(self, step: Any) -> None:
        """Do a step unless an earlier one failed; a failure ends this contender, not the run."""
        if self.failure is not None:
            return
        try:
            step()
        except Exception as error:  # a case is a plugin's code; the reader of the record sees the error
            # The error itself is not kept: its frames hold the memory that the next contender needs.
            self.failure = _failure(error)
        if self.failure is not None:
            self._output = None
            self.device.memory.empty_cache()

    @property
    def wants_more(self) -> bool:
        if self.num_runs is not None:
            enough = self.num_runs
        else:
            enough = self.sampling.min_samples if self._spent_s > self.sampling.budget_s else self.sampling.max_samples
        return self.failure is None and len(self.samples) < enough

    @property
    def is_cold(self) -> bool:
        """The cache is overwritten before each sample; senseless where many runs follow each other in it."""
        return self.num_runs is None and self.runs_per_sample == 1 and self.contender.seconds is None

    def warm_up(self) -> None:
        self.first_run_s = self._timed(1)
        self.contender.check(self._output)
        self._spent_s = 0.0  # compiling is not measuring
        recent: list[float] = []
        while not recent or not (self._is_stable(recent) or self._has_warmed_up_long_enough):
            recent = [*recent[-2:], self._timed(1) if recent else self._timed_with_memory()]
            self.num_warmup += 1
        if self.contender.seconds is None:
            self.runs_per_sample = max(1, math.ceil(self.sampling.shortest_sample_s / statistics.median(recent)))

    @property
    def _has_warmed_up_long_enough(self) -> bool:
        return self.num_warmup >= self.sampling.max_warmup or self._spent_s > self.sampling.budget_s

    def _is_stable(self, recent: list[float]) -> bool:
        if len(recent) < 3:
            return False
        return max(recent) - min(recent) <= self.sampling.stable_spread * statistics.median(recent)

    def sample(self) -> None:
        if self.is_cold:
            self._flush()
        self.samples.append(self._timed(self.runs_per_sample))
        for name, seconds in self._own.items():
            self.own_samples.setdefault(name, []).append(seconds)
        if self.num_runs is not None:
            self.contender.check(self._output)
        if self.contender.quantities is not None:
            for name, quantity in self.contender.quantities(self._output).items():
                self.quantities.setdefault(name, []).append(quantity)

    def _timed_with_memory(self) -> float:
        """Also what one run takes at its peak beyond what was there before: inputs are not counted, its output is."""
        if self.device.spec.is_host:
            return self._timed(1)
        memory = self.device.memory
        self._output = None
        self.device.synchronize()
        before = memory.stats().allocated_bytes
        memory.reset_peak()
        seconds = self._timed(1)
        extra = memory.stats().peak_allocated_bytes - before
        if extra > 0:
            self.quantities["extra_memory"] = [Quantity(extra, "B")]
        return seconds

    def measure_energy(self, monitor: Monitor) -> None:
        """Of one run, from many in a row: the counters move about ten times a second."""
        self.device.synchronize()
        before, started, runs = monitor.energy_j(), time.perf_counter(), 0
        if before is None:
            return
        while time.perf_counter() - started < self.sampling.energy_s:
            self._timed(self.runs_per_sample)
            runs += self.runs_per_sample
        after = monitor.energy_j()
        if after is not None and after > before:
            self.quantities["energy"] = [Quantity((after - before) / runs, "J")]

    def metrics(self) -> list[Metric]:
        found = [Metric(name="time", unit="s", samples=self.samples)]
        found += [Metric(name=name, unit="s", samples=samples) for name, samples in self.own_samples.items()]
        if self.first_run_s is not None:
            found.append(Metric(name="first_run", unit="s", samples=[self.first_run_s]))
        return found + [
            Metric(name=name, unit=found[0].unit, samples=[quantity.value for quantity in found])
            for name, found in self.quantities.items()
        ]

    def check_last(self) -> None:
        """The output of the last timed run: a run that spoils its inputs is wrong by now."""
        self.contender.check(self._output)
        self._output = None

    def _timed(self, runs: int) -> float:
        """Seconds of one run by the host's clock; ``_own`` is what it took by clocks that others do not advance."""
        self._output = None  # so that memory holds one output, not two
        run, is_host = self.contender.run, self.device.spec.is_host
        events = None if is_host else [self.device.streams.event(timing=True) for _ in range(2)]
        self.device.synchronize()
        start, processor = time.perf_counter(), _processor_s()
        if events:
            events[0].record()
        for _ in range(runs):
            output = run()
        if events:
            events[1].record()
        self.device.synchronize()
        elapsed, processor = time.perf_counter() - start, _processor_s() - processor
        self._output = output
        self._spent_s += elapsed
        if self.contender.seconds is not None:
            return self.contender.seconds(output)
        if events:
            self._own = {"device_time": events[0].elapsed_time(events[1]) / 1000 / runs}
        elif processor > 0:
            self._own = {"processor_time": processor / runs}
        return elapsed / runs


def _processor_s() -> float:
    """Of all threads of this process, and of the children it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _result(case: Case, work: Work, trial: _Trial, monitor: Monitor) -> CaseResult:
    name, params = trial.contender.implementation, {**work.params, **trial.contender.params}
    if trial.failure is not None:
        return _not_measured(case.name, name, params, trial.failure)
    telemetry = monitor.telemetry()
    return CaseResult(
        name=case.name,
        implementation=name,
        status="pass",
        params=params,
        metrics=trial.metrics(),
        num_warmup=trial.num_warmup,
        runs_per_sample=trial.runs_per_sample,
        flops=work.flops,
        bytes=work.bytes,
        limits=_limits(work) if trial.contender.limits is None else dict(trial.contender.limits),
        cache="cold" if trial.is_cold else "warm",
        telemetry=telemetry,
        marks=marks(telemetry),
    )


def _limits(work: Work) -> dict[str, int]:
    if work.limits is not None:
        return dict(work.limits)
    found = {} if work.bytes is None else {"memory": work.bytes}
    dtype = work.params.get("dtype")
    return found if work.flops is None or dtype is None else {f"product/{dtype}": work.flops, **found}


class _Failure(NamedTuple):
    status: Status
    reason: str


def _failure(error: Exception) -> _Failure:
    return _Failure(_status(error), f"{type(error).__name__}: {error}".strip(": \n"))


def _not_measured(
    case: str, implementation: str, params: dict[str, int | float | str], failure: _Failure
) -> CaseResult:
    return CaseResult(
        name=case, implementation=implementation, status=failure.status, params=params, reason=failure.reason
    )


def _status(error: Exception) -> Status:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "oom"
    # torch's CPU allocator raises a plain RuntimeError.
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error):
        return "oom"
    if isinstance(error, (UnsupportedError, MissingDependencyError, DeviceError)):
        return "blocked"
    return "fail"
