"""Run cases: warm up until stable, check, then time the contenders in turns.

Contenders of a case take turns sample by sample, so that a machine that slows down slows all of them. The
first run (imports, compilation, autotuning) is reported apart. A sample of something shorter than the clock
resolves is the mean over several runs; how many is recorded. A case of minutes states its number of runs instead.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from rlcore import __version__
from rlcore.bench.case import Case, Contender, Quantity, Work
from rlcore.bench.result import SCHEMA, CaseResult, Metric, Record, Status, write
from rlcore.bench.system import describe_system, installed_versions, recorded_environment, source_commit
from rlcore.errors import BenchError, DeviceError, MissingDependencyError, UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How much to measure."""

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


def run_cases(
    cases: Sequence[Case],
    device: Any,
    path: Path,
    *,
    sampling: Sampling | None = None,
    report: Callable[[CaseResult], None] = lambda result: None,
) -> Record:
    """Run ``cases`` one after the other; each is in the file at ``path`` when it ends; ``report`` gets it.

    Raises:
        BenchError: the record cannot be written.
        KeyboardInterrupt: after writing what is done, and the rest as skipped.
    """
    if not os.access(path.parent, os.W_OK):
        raise BenchError(f"cannot write the benchmark record {path}: no folder {path.parent} that can be written to")
    record = _empty_record(device)
    for position, case in enumerate(cases):
        try:
            results = run_case(case, device, sampling)
        except KeyboardInterrupt:
            write(_with(record, [_skipped(left) for left in cases[position:]]), path)
            raise
        record = _with(record, results)
        write(record, path)
        for result in results:
            report(result)
    return record


def _empty_record(device: Any) -> Record:
    import torch

    return Record(
        schema=SCHEMA,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        rlcore=__version__,
        commit=source_commit(),
        system=describe_system(device),
        dependencies=installed_versions(),
        environment=recorded_environment(device),
        num_threads=torch.get_num_threads(),
        cases=[],
    )


def _with(record: Record, results: list[CaseResult]) -> Record:
    return msgspec.structs.replace(record, cases=[*record.cases, *results])


def _skipped(case: Case) -> CaseResult:
    return CaseResult(name=case.name, implementation="", status="skipped", params={}, reason="the run was interrupted")


def run_case(case: Case, device: Any, sampling: Sampling | None = None) -> list[CaseResult]:
    """One result for each contender, in their order; whatever goes wrong is a status with its reason."""
    try:
        work = case.prepare(device)
    except Exception as error:  # a case is a plugin's code; the reader of the record sees the error
        return [_not_measured(case.name, "", {}, error)]
    trials = [_Trial(contender, device, sampling or Sampling(), work.num_runs) for contender in work.contenders]
    for trial in trials:
        if work.num_runs is None:
            trial.attempt(trial.warm_up)
    for trial in _in_turns(trials):
        trial.attempt(trial.sample)
    for trial in trials:
        trial.attempt(trial.check_last)
    return [_result(case, work, trial) for trial in trials]


def _in_turns(trials: list[_Trial]) -> Iterator[_Trial]:
    while active := [trial for trial in trials if trial.wants_more]:
        yield from active


class _Trial:
    """One contender being measured."""

    def __init__(self, contender: Contender, device: Any, sampling: Sampling, num_runs: int | None) -> None:
        self.contender = contender
        self.device = device
        self.sampling = sampling
        self.num_runs = num_runs
        self.first_run_s: float | None = None
        self.num_warmup = 0
        self.runs_per_sample = 1
        self.samples: list[float] = []
        self.quantities: dict[str, list[Quantity]] = {}
        self.error: Exception | None = None
        self._output: Any = None
        self._spent_s = 0.0

    def attempt(self, step: Any) -> None:
        """Do a step unless an earlier one failed; a failure ends this contender, not the run."""
        if self.error is not None:
            return
        try:
            step()
        except Exception as error:  # a case is a plugin's code; the reader of the record sees the error
            self.error = error
            self._output = None

    @property
    def wants_more(self) -> bool:
        if self.num_runs is not None:
            enough = self.num_runs
        else:
            enough = self.sampling.min_samples if self._spent_s > self.sampling.budget_s else self.sampling.max_samples
        return self.error is None and len(self.samples) < enough

    def warm_up(self) -> None:
        self.first_run_s = self._timed(1)
        self.contender.check(self._output)
        recent: list[float] = []
        while self.num_warmup < self.sampling.max_warmup and not self._is_stable(recent):
            recent = [*recent[-2:], self._timed(1)]
            self.num_warmup += 1
        if self.contender.seconds is None:
            self.runs_per_sample = max(1, math.ceil(self.sampling.shortest_sample_s / statistics.median(recent)))

    def _is_stable(self, recent: list[float]) -> bool:
        if len(recent) < 3:
            return False
        return max(recent) - min(recent) <= self.sampling.stable_spread * statistics.median(recent)

    def sample(self) -> None:
        self.samples.append(self._timed(self.runs_per_sample))
        if self.num_runs is not None:
            self.contender.check(self._output)
        if self.contender.quantities is not None:
            for name, quantity in self.contender.quantities(self._output).items():
                self.quantities.setdefault(name, []).append(quantity)

    def metrics(self) -> list[Metric]:
        first_run = [] if self.first_run_s is None else [Metric(name="first_run", unit="s", samples=[self.first_run_s])]
        others = [
            Metric(name=name, unit=found[0].unit, samples=[quantity.value for quantity in found])
            for name, found in self.quantities.items()
        ]
        return [Metric(name="time", unit="s", samples=self.samples), *first_run, *others]

    def check_last(self) -> None:
        """The output of the last timed run: a run that spoils its inputs is wrong by now."""
        self.contender.check(self._output)
        self._output = None

    def _timed(self, runs: int) -> float:
        self._output = None  # so that memory holds one output, not two
        run = self.contender.run
        self.device.synchronize()
        start = time.perf_counter()
        for _ in range(runs):
            output = run()
        self.device.synchronize()
        elapsed = time.perf_counter() - start
        self._output = output
        self._spent_s += elapsed
        return elapsed / runs if self.contender.seconds is None else self.contender.seconds(output)


def _result(case: Case, work: Work, trial: _Trial) -> CaseResult:
    name = trial.contender.implementation
    if trial.error is not None:
        return _not_measured(case.name, name, dict(work.params), trial.error)
    return CaseResult(
        name=case.name,
        implementation=name,
        status="pass",
        params=dict(work.params),
        metrics=trial.metrics(),
        num_warmup=trial.num_warmup,
        runs_per_sample=trial.runs_per_sample,
        flops=work.flops,
        bytes=work.bytes,
    )


def _not_measured(case: str, implementation: str, params: dict[str, int | float | str], error: Exception) -> CaseResult:
    return CaseResult(
        name=case,
        implementation=implementation,
        status=_status(error),
        params=params,
        reason=f"{type(error).__name__}: {error}".strip(": \n"),
    )


def _status(error: Exception) -> Status:
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "oom"
    # torch's CPU allocator raises a plain RuntimeError.
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error):
        return "oom"
    if isinstance(error, (UnsupportedError, MissingDependencyError, DeviceError)):
        return "blocked"
    return "fail"
