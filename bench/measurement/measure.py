"""Measure one case in this process: warm up until stable, check, then time the contenders in turns.

Contenders take turns sample by sample, so that a machine that slows down slows all of them. The first run (imports,
compilation, autotuning) is reported apart. A sample of something shorter than the clock resolves is the mean over
several runs; how many is recorded. Single runs find a cold cache. A case of minutes states its number of runs instead.
"""

from __future__ import annotations

import functools
import math
import resource
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from rlcore.bench import steps
from rlcore.bench.case import Case, Contender, Work
from rlcore.bench.measurement.device_clock import DeviceClock, Flush
from rlcore.bench.measurement.telemetry import Monitor, marks
from rlcore.bench.record import CUT_SHORT, CaseResult, Metric, Status, no_number
from rlcore.device import Device
from rlcore.errors import DeviceError, MissingDependencyError, UnsupportedError

_NEGLIGIBLE = 0.01
"""The share of a run's time that the host may take to queue it for ``device_time`` to be the device's all the same."""
_LEAST_WARMUP = 2
"""However long they take: the run after the first may compile once more, for sizes that change, or fill a cache."""

UNRECORDED_TURNS = 2
"""Turns of all contenders before the first sample."""
_SHORT_S = 0.1
"""The longest run that takes these turns: of a longer one a cold cache is a small share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The amount to measure in one process."""

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


SoFar = Callable[[list[CaseResult]], None]


def _ignore(results: list[CaseResult]) -> None:
    pass


def run_case(case: Case, device: Device, sampling: Sampling | None = None, so_far: SoFar = _ignore) -> list[CaseResult]:
    """Return one result for each contender, in their order; an error becomes a status with its reason.

    Args:
        so_far: gets, of a case that states its number of runs, what there is after each of them.
    """
    sampling = sampling or Sampling()
    monitor = Monitor(device)
    device.activate()
    try:
        work = case.prepare(device)
        if not isinstance(work, Work):
            raise TypeError(f"prepare returned {work!r}, which is no bench.case.Work")
        _expect_distinct(work)
    except Exception as error:  # a case is a plugin's code; the reader of the record sees the error
        return [no_number(case.name, *_failure(error))]
    try:
        return _measure(case, work, device, sampling, monitor, so_far)
    finally:
        if work.close is not None:
            work.close()


def _expect_distinct(work: Work) -> None:
    """Raise ValueError if two contenders have the same name and sizes: their results could not be distinguished."""
    seen = set()
    for one in work.contenders:
        same = one.implementation, *sorted({**work.params, **one.params}.items())
        if same in seen:
            raise ValueError(f"{same[0]!r} names two contenders of the same sizes; give each its own name or params")
        seen.add(same)


def _measure(  # noqa: PLR0917
    case: Case, work: Work, device: Device, sampling: Sampling, monitor: Monitor, so_far: SoFar
) -> list[CaseResult]:
    began_at, flush = time.time(), Flush(device, is_host=_is_on_host(work, device))
    trials = [Trial(contender, work, device, sampling, flush) for contender in work.contenders]
    for trial in trials:
        if work.num_runs is None:
            trial.attempt(trial.warm_up)
    for trial in [trial for trial in trials if trial.num_runs is None] * UNRECORDED_TURNS:
        trial.attempt(trial.warm_up_in_turn)
    for trial in _in_turns(trials):
        if trial.num_runs is not None:
            steps.begin(trial.contender.implementation)
        trial.attempt(trial.sample)
        monitor.read()
        if trial.num_runs is not None:
            so_far([_unfinished(case, work, one, monitor, began_at) for one in trials])
    for trial in trials:
        trial.attempt(trial.check_last)
        if sampling.energy_s and work.num_runs is None:
            trial.attempt(functools.partial(trial.measure_energy, monitor))
    return [_result(case, work, trial, monitor, began_at) for trial in trials]


def _in_turns(trials: list[Trial]) -> Iterator[Trial]:
    while active := [trial for trial in trials if trial.wants_more]:
        yield from active


def _result(case: Case, work: Work, trial: Trial, monitor: Monitor, began_at: float) -> CaseResult:
    name, params = trial.contender.implementation, {**work.params, **trial.contender.params}
    if trial.failure is not None:
        return no_number(case.name, *trial.failure, name, params)
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
        rounds_at=[began_at],
        limits=_limits(work) if trial.contender.limits is None else dict(trial.contender.limits),
        cache="cold" if trial.is_cold else "warm",
        telemetry=telemetry,
        marks=marks(telemetry),
    )


def _unfinished(case: Case, work: Work, trial: Trial, monitor: Monitor, began_at: float) -> CaseResult:
    if trial.failure is None and not trial.samples:
        name, params = trial.contender.implementation, {**work.params, **trial.contender.params}
        return no_number(case.name, "skipped", "the run ended before it had its turn", name, params)
    found = _result(case, work, trial, monitor, began_at)
    if not trial.wants_more:
        return found
    return msgspec.structs.replace(found, marks=[*found.marks, f"{CUT_SHORT}: {trial.progress}"])


def _limits(work: Work) -> dict[str, int]:
    if work.limits is not None:
        return dict(work.limits)
    found = {} if work.bytes is None else {"memory": work.bytes}
    dtype = work.params.get("dtype")
    return found if work.flops is None or dtype is None else {f"product/{dtype}": work.flops, **found}


# ---------------------------------------------------------------------------------------------- one contender


class Trial:
    """One contender being measured."""

    def __init__(self, contender: Contender, work: Work, device: Device, sampling: Sampling, flush: Flush) -> None:
        self.contender = contender
        self.device = device
        self.sampling = sampling
        self.num_runs = work.num_runs
        if work.num_runs is not None and contender.most_runs is not None:
            self.num_runs = min(work.num_runs, contender.most_runs)
        self.first_run_s: float | None = None
        self.num_warmup = 0
        self.runs_per_sample = 1
        self.samples: list[float] = []
        self.own_samples: dict[str, list[float]] = {}
        """By the name of a clock beside the host's."""
        self.unhidden_s: list[float] = []
        """How long the host took to queue a run, where ``device_time`` holds that."""
        self.quantities: dict[str, Metric] = {}
        self.failure: tuple[Status, str] | None = None
        """Its status and the reason."""
        self._flush = flush
        self._is_on_host = _is_on_host(work, device)
        self._is_on_stream = work.runs_on == "stream" and not self._is_on_host
        self._device_clock: DeviceClock | None = None
        self._num_sampled = 0
        """Runs, or groups of them, of which samples were taken."""
        self._output: Any = None
        self._own: dict[str, float] = {}
        self._queued_s = 0.0
        self._spent_s = 0.0

    def attempt(self, step: Callable[[], None]) -> None:
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
        return self.failure is None and self._num_sampled < enough

    @property
    def progress(self) -> str:
        return f"{self._num_sampled} of {self.num_runs} runs"

    @property
    def is_cold(self) -> bool:
        """Return True if the cache is overwritten before each sample; with many runs a sample that has no meaning."""
        return self.num_runs is None and self.runs_per_sample == 1 and self.contender.seconds is None

    def warm_up(self) -> None:
        self.first_run_s = statistics.median(self._timed(1))
        self.contender.check(self._output)
        self._spent_s = 0.0  # compiling is not measuring
        recent: list[float] = []
        while not recent or not (self._is_stable(recent) or self._has_warmed_up_long_enough):
            latest = self._timed(1) if recent else self._timed_with_memory()
            recent = [*recent[-2:], statistics.median(latest)]
            self.num_warmup += 1
        if self.contender.seconds is None:
            self.runs_per_sample = max(1, math.ceil(self.sampling.shortest_sample_s / statistics.median(recent)))
            if self._is_on_stream and self._queued_s > _NEGLIGIBLE * recent[-1]:
                self._hide_queueing()

    def warm_up_in_turn(self) -> None:
        """Run as for a sample: the first run after another contender's takes up to twice as long as later ones."""
        if self.contender.seconds is not None or self._spent_s > self.num_warmup * _SHORT_S:
            return
        if self.is_cold:
            self._flush()
        self._timed(self.runs_per_sample)
        self.num_warmup += self.runs_per_sample

    def _hide_queueing(self) -> None:
        self._output = None
        clock = DeviceClock(self.device, self._flush)
        if clock.can_hide(self.contender.run, self.runs_per_sample, self._queued_s):
            self._device_clock = clock

    @property
    def _has_warmed_up_long_enough(self) -> bool:
        is_over = self.num_warmup >= _LEAST_WARMUP and self._spent_s > self.sampling.budget_s
        return is_over or self.num_warmup >= self.sampling.max_warmup

    def _is_stable(self, recent: list[float]) -> bool:
        if len(recent) < 3:
            return False
        return max(recent) - min(recent) <= self.sampling.stable_spread * statistics.median(recent)

    def sample(self) -> None:
        if self.is_cold:
            self._flush()
        self.samples += self._timed(self.runs_per_sample)
        self._num_sampled += 1
        if self.num_runs is not None:
            self.contender.check(self._output)
        if self.contender.quantities is not None:
            for name, quantity in self.contender.quantities(self._output).items():
                metric = self.quantities.setdefault(name, Metric(name=name, unit=quantity.unit, samples=[]))
                metric.samples.extend(_each(name, quantity.value))
        is_hidden = self._device_clock is not None and self._time_on_device(self._device_clock)
        for name, seconds in self._own.items():
            self.own_samples.setdefault(name, []).append(seconds)
        if "device_time" in self._own and not is_hidden and self._queued_s > _NEGLIGIBLE * self.samples[-1]:
            self.unhidden_s.append(self._queued_s)

    def _time_on_device(self, clock: DeviceClock) -> bool:
        """Return whether the time is without the host's."""
        self._output = None
        start = time.perf_counter()
        launched = clock.time(self.contender.run, self.runs_per_sample)
        self._spent_s += time.perf_counter() - start
        self._output, self._own = launched.output, {"device_time": launched.seconds}
        return launched.is_hidden

    def _timed_with_memory(self) -> list[float]:
        """Time one run, and record the memory that it takes at its peak: its output counts, its inputs do not."""
        if self._is_on_host:
            return self._timed(1)
        memory = self.device.memory
        self._output = None
        self.device.synchronize()
        before = memory.stats().allocated_bytes
        memory.reset_peak()
        seconds = self._timed(1)
        extra = memory.stats().peak_allocated_bytes - before
        if extra > 0:
            self.quantities["extra_memory"] = Metric(name="extra_memory", unit="B", samples=[float(extra)])
        return seconds

    def measure_energy(self, monitor: Monitor) -> None:
        """Measure the energy of one run, from many in a row: the counters move about ten times a second."""
        self.device.synchronize()
        before, started, runs = monitor.energy_j(), time.perf_counter(), 0
        if before is None or self._is_on_host != self.device.spec.is_host:
            return
        while time.perf_counter() - started < self.sampling.energy_s:
            self._timed(self.runs_per_sample)
            runs += self.runs_per_sample
        after = monitor.energy_j()
        if after is not None and after > before:
            self.quantities["energy"] = Metric(name="energy", unit="J", samples=[(after - before) / runs])

    def metrics(self) -> list[Metric]:
        found = [Metric(name="time", unit="s", samples=self.samples)]
        found += [Metric(name=name, unit="s", samples=samples) for name, samples in self.own_samples.items()]
        if self.first_run_s is not None:
            found.append(Metric(name="first_run", unit="s", samples=[self.first_run_s]))
        if self.unhidden_s:
            found.append(Metric(name="queueing_in_device_time", unit="s", samples=self.unhidden_s))
        return [*found, *self.quantities.values()]

    def check_last(self) -> None:
        """Check the output of the last timed run: a run that spoils its inputs is wrong by now."""
        self.contender.check(self._output)
        self._output = None

    def _timed(self, runs: int) -> list[float]:
        """Return the seconds of one run by the host's clock, from an idle device until it is idle again.

        A run that measures itself returns the seconds of its steps. ``_own`` gets the time by clocks that other
        processes do not advance.
        """
        self._output = None  # so that memory holds one output, not two
        run, has_events = self.contender.run, not self._is_on_host and self._device_clock is None
        events = [self.device.streams.event(timing=True) for _ in range(2)] if has_events else []
        self.device.synchronize()
        processor, start = _processor_s(), time.perf_counter()
        if events:
            events[0].record()
        for _ in range(runs):
            output = run()
        if events:
            events[1].record()
        queued = time.perf_counter()
        if not self._is_on_host:
            self.device.synchronize()
        elapsed, processor = time.perf_counter() - start, _processor_s() - processor
        self._output, self._queued_s = output, (queued - start) / runs
        self._spent_s += elapsed
        if self.contender.seconds is not None:
            return _each("seconds", self.contender.seconds(output))
        if events:
            self._own = {"device_time": events[0].elapsed_time(events[1]) / 1000 / runs}
        elif self._is_on_host and processor > 0:
            self._own = {"processor_time": processor / runs}
        return [elapsed / runs]


def _each(name: str, value: float | Sequence[float]) -> list[float]:
    """Return the values that a case value, one or several."""
    values = list(value) if isinstance(value, Sequence) else [value]
    if not values or not all(0 < one < math.inf for one in values):
        raise ValueError(f"the case says that {name} is {value!r}; a record takes positive numbers alone")
    return values


def _is_on_host(work: Work, device: Device) -> bool:
    return bool(device.spec.is_host) or work.runs_on == "host"


def _processor_s() -> float:
    """Return the time of all threads of this process, and of the children it has waited for."""
    return time.process_time() + processor_s_of_children()


def processor_s_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _failure(error: Exception) -> tuple[Status, str]:
    return _status(error), f"{type(error).__name__}: {error}".strip(": \n")


def _status(error: Exception) -> Status:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "oom"
    # torch's CPU allocator raises a plain RuntimeError.
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error):
        return "oom"
    if isinstance(error, (UnsupportedError, MissingDependencyError, DeviceError)) or _is_of_another_library(error):
        return "blocked"
    return "fail"


def _is_of_another_library(error: Exception) -> bool:
    """Return True if an import failed inside another library: some import what they need when first called."""
    frames = traceback.walk_tb(error.__traceback__)
    modules = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in frames]
    importing = [module for module in modules if module not in {"importlib", "_frozen_importlib"}]
    return isinstance(error, ImportError) and importing[-1] != __name__.partition(".")[0]
