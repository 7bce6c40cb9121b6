"""Run cases in rounds, keep what is done on disk, and say how long it will take.

A round is every case once, each in a process of its own (``isolated.py``). Later rounds measure the same again some
time later in another process: what differs between rounds is the noise that ``compare`` must not take for a change.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rlcore.bench.case import Case
from rlcore.bench.result import CaseResult, Effort, Metric, Record, identity, write
from rlcore.bench.telemetry import joined, marks
from rlcore.bench.trial import Sampling
from rlcore.errors import BenchError

_EFFORTS: tuple[Effort, ...] = ("quick", "standard", "full")

RunCase = Callable[[Case], list[CaseResult]]
Report = Callable[[Case, list[CaseResult]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much a run measures."""

    effort: Effort
    rounds: int
    sampling: Sampling

    def leaves_out(self, case: Case) -> bool:
        return _EFFORTS.index(case.effort) > _EFFORTS.index(self.effort)


PLANS: dict[Effort, Plan] = {
    "quick": Plan(
        effort="quick", rounds=2, sampling=Sampling(min_samples=3, max_samples=5, budget_s=0.2, max_warmup=5)
    ),
    "standard": Plan(
        effort="standard",
        rounds=3,
        sampling=Sampling(min_samples=3, max_samples=10, budget_s=1.0),
    ),
    "full": Plan(
        effort="full",
        rounds=3,
        sampling=Sampling(min_samples=3, max_samples=10, budget_s=2.0, energy_s=0.5),
    ),
}


def check_can_write(path: Path) -> None:
    """Raises BenchError when it cannot be, before minutes are spent."""
    if not os.access(path.parent, os.W_OK):
        raise BenchError(f"cannot write the benchmark record {path}: no folder {path.parent} that can be written to")


def _ignore(case: Case, results: list[CaseResult]) -> None:
    pass


@dataclass(slots=True, kw_only=True)
class Run:
    """One run of cases; ``record`` is what the file holds."""

    record: Record
    path: Path
    run: RunCase
    rounds: int = 1
    report: Report = _ignore
    """Gets each case when a round of it ended, with all rounds of it so far."""
    _results: dict[str, list[CaseResult]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_can_write(self.path)

    def cases(self, cases: Sequence[Case], left_out: Sequence[Case] = ()) -> Record:
        """Run ``cases``; each is in the file when it ends.

        Raises:
            BenchError: the record cannot be written; it is as it was after the case before.
            KeyboardInterrupt: after writing what is done, and the rest as skipped.
        """
        for case in left_out:
            self._results[case.name] = [_skipped(case, f"it takes longer than a {self.record.effort} run has")]
        try:
            for number in range(self.rounds):
                for case in cases:
                    self._round(case, number)
        except KeyboardInterrupt:
            for case in cases:
                self._results.setdefault(case.name, [_skipped(case, "the run was interrupted")])
            self._write()
            raise
        return self.record

    def _round(self, case: Case, number: int) -> None:
        earlier = self._results.get(case.name, [])
        if number and not any(map(_is_repeated, earlier)):
            return
        found = self.run(case)
        self._results[case.name] = _merged(earlier, found) if number else found
        self._write()
        self.report(case, self._results[case.name])

    def _write(self) -> None:
        results = [result for results in self._results.values() for result in results]
        self.record = msgspec.structs.replace(self.record, cases=results)
        write(self.record, self.path)


def _is_repeated(result: CaseResult) -> bool:
    """What states its number of runs has had them, and has no first run apart; what failed has failed."""
    return any(metric.name == "first_run" for metric in result.metrics)


def _skipped(case: Case, reason: str) -> CaseResult:
    return CaseResult(name=case.name, implementation="", status="skipped", params={}, reason=reason)


def _merged(earlier: list[CaseResult], later: list[CaseResult]) -> list[CaseResult]:
    """All samples of what passed in every round; the failure of what did not."""
    if any(not result.implementation for result in later):  # the case as a whole failed
        return later
    found = {identity(result): result for result in later}
    return [_joined(result, found[identity(result)]) for result in earlier if identity(result) in found]


def _joined(first: CaseResult, second: CaseResult) -> CaseResult:
    if first.status != "pass" or second.status != "pass":
        return first if first.status != "pass" else second
    others = {metric.name: metric.samples for metric in second.metrics}
    metrics = [
        Metric(name=metric.name, unit=metric.unit, samples=metric.samples + others.get(metric.name, []))
        for metric in first.metrics
    ]
    rounds = [*(first.rounds or [len(first.samples("time"))]), len(second.samples("time"))]
    told = joined(first.telemetry, second.telemetry) if first.telemetry and second.telemetry else first.telemetry
    return msgspec.structs.replace(
        first, metrics=metrics, rounds=rounds, telemetry=told, marks=marks(told) if told else []
    )
