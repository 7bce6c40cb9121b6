"""Measure one case in this process: warm up until stable, check, then time the contenders in turns.

Contenders take turns sample by sample, so that a machine that slows down slows all of them. The first run (imports,
compilation, autotuning) is reported apart. A sample of something shorter than the clock resolves is the mean over
several runs; how many is recorded. Single runs find a cold cache. A case of minutes states its number of runs instead.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

from rlcore.bench import steps
from rlcore.bench.case import Case, Work
from rlcore.bench.device_clock import Flush
from rlcore.bench.record import CaseResult
from rlcore.bench.telemetry import Monitor, marks
from rlcore.bench.trial import Sampling, Trial, TrialFailure, failure_of, is_on_host
from rlcore.device import Device


def run_case(case: Case, device: Device, sampling: Sampling | None = None) -> list[CaseResult]:
    """One result for each contender, in their order; whatever goes wrong is a status with its reason."""
    sampling = sampling or Sampling()
    monitor = Monitor(device)
    device.activate()
    try:
        work = case.prepare(device)
        if not isinstance(work, Work):
            raise TypeError(f"prepare returned {work!r}, which is no bench.case.Work")
        _expect_distinct(work)
    except Exception as error:  # a case is a plugin's code; the reader of the record sees the error
        return [_not_measured(case.name, "", {}, failure_of(error))]
    try:
        return _measure(case, work, device, sampling, monitor)
    finally:
        if work.close is not None:
            work.close()


def _expect_distinct(work: Work) -> None:
    """Nobody could tell which of two results of one name is which."""
    seen = set()
    for one in work.contenders:
        same = one.implementation, *sorted({**work.params, **one.params}.items())
        if same in seen:
            raise ValueError(f"{same[0]!r} names two contenders of the same sizes; give each its own name or params")
        seen.add(same)


def _measure(case: Case, work: Work, device: Device, sampling: Sampling, monitor: Monitor) -> list[CaseResult]:
    began_at, flush = time.time(), Flush(device, is_host=is_on_host(work, device))
    trials = [Trial(contender, work, device, sampling, flush) for contender in work.contenders]
    for trial in trials:
        if work.num_runs is None:
            trial.attempt(trial.warm_up)
    for trial in _in_turns(trials):
        if trial.num_runs is not None:
            steps.begin(trial.contender.implementation)
        trial.attempt(trial.sample)
        monitor.read()
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
        rounds_at=[began_at],
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


def _not_measured(
    case: str, implementation: str, params: dict[str, int | float | str], failure: TrialFailure
) -> CaseResult:
    return CaseResult(
        name=case, implementation=implementation, status=failure.status, params=params, reason=failure.reason
    )
