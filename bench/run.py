"""Run cases in rounds, keep what is done on disk, and go on with what an earlier call has left.

A round is every case once, each in a process of its own (``isolated.py``). Later rounds measure the same again some
time later in another process: what differs between rounds is the noise that ``compare`` must not take for a change.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rlcore.atomic import is_special, resolved, write_file
from rlcore.bench.case import Case
from rlcore.bench.compare import NOTES, what_differs
from rlcore.bench.measurement.measure import Sampling
from rlcore.bench.measurement.telemetry import joined, marks
from rlcore.bench.record import CUT_SHORT, BenchCall, CaseResult, Effort, Metric, Record, identity, no_number, write
from rlcore.device import Device
from rlcore.errors import BenchError
from rlcore.settings import Settings

_EFFORTS: tuple[Effort, ...] = ("quick", "standard", "full")
_NO_NUMBER = ("skipped", "fail", "oom")

RunCase = Callable[[Case], list[CaseResult]]
Report = Callable[[Case, list[CaseResult]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The size of a run: its kind, rounds and samples."""

    effort: Effort
    rounds: int
    sampling: Sampling

    def part(self, cases: Sequence[Case]) -> tuple[list[Case], list[Case]]:
        """Return the cases that it runs, and those that it leaves out.

        Cases of quick runs come first: a run that is cut short has them at least.
        """
        ranked = sorted(cases, key=lambda case: _EFFORTS.index(case.effort))
        count = sum(_EFFORTS.index(case.effort) <= _EFFORTS.index(self.effort) for case in ranked)
        return ranked[:count], ranked[count:]


PLANS: dict[Effort, RunPlan] = {
    # Between two quick runs 3 rounds are too few to tell a 1.3x on most hosts, and 5 are enough.
    "quick": RunPlan(
        effort="quick", rounds=5, sampling=Sampling(min_samples=3, max_samples=5, budget_s=0.2, max_warmup=5)
    ),
    "standard": RunPlan(
        effort="standard",
        rounds=3,
        sampling=Sampling(min_samples=3, max_samples=10, budget_s=1.0),
    ),
    "full": RunPlan(
        effort="full",
        rounds=3,
        sampling=Sampling(min_samples=3, max_samples=10, budget_s=2.0, energy_s=0.5),
    ),
}


def check_can_write(path: Path) -> None:
    """Raises BenchError when it cannot be, before minutes are spent."""
    if path.is_dir():
        raise BenchError(f"cannot write the benchmark record {path}: it is a folder; give a file in it")
    if is_special(path):
        raise BenchError(f"cannot write the benchmark record {path}: it is a device or a pipe; give a file")
    try:
        folder = resolved(path).parent if path.is_symlink() else path.parent
    except OSError as error:
        raise BenchError(f"cannot write the benchmark record {path}: {error.strerror}; give a file") from error
    if not os.access(folder, os.W_OK):
        raise BenchError(f"cannot write the benchmark record {path}: no folder {folder} that can be written to")


def _ignore(case: Case, results: list[CaseResult]) -> None:
    pass


def _nothing(case: Case) -> list[CaseResult]:
    return []


def _always(case: Case) -> bool:
    return True


@dataclass(slots=True, kw_only=True)
class BenchRun:
    """One run of cases; ``record`` is what the file holds.

    A record with results is gone on with: they stay, but for cases without any number, which run again. Rounds are
    added to those that this very commit measured.
    """

    record: Record
    path: Path
    run: RunCase
    so_far: RunCase = _nothing
    """Returns what a case had found that was interrupted."""
    rounds: int = 1
    report: Report = _ignore
    """Gets each case when a round of it ended, with all rounds of it so far."""
    has_time_for: Callable[[Case], bool] = _always
    """Tells whether another round of a case fits into the time that the run has."""
    _results: dict[str, list[CaseResult]] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set, init=False)
    """Cases that other code measured: their rounds are not mixed with those of this run."""

    def __post_init__(self) -> None:
        check_can_write(self.path)
        self._results = {name: found for name, found in self.record.by_case().items() if not _is_open(found)}
        now = self.record.calls[-1].commit if self.record.calls else self.record.commit
        for call in self.record.calls:
            if call.commit != now or (now or "").endswith("-modified"):
                self.settled |= call.rounds.keys() & self._results.keys()

    def cases(self, cases: Sequence[Case], left_out: Sequence[Case] = ()) -> Record:
        """Run ``cases``; each is in the file when it ends.

        Raises:
            BenchError: the record cannot be written; it is as it was after the case before.
            KeyboardInterrupt: after writing what is done, and the rest as skipped.
        """
        try:
            for number in range(self.rounds):
                for case in cases:
                    if self._wants_round(case, number):
                        self._round(case)
        finally:
            self._skip(cases, "the run was interrupted")
            self._skip(left_out, f"it takes longer than a {self.record.effort} run has")
            self._write()
        return self.record

    def _skip(self, cases: Sequence[Case], reason: str) -> None:
        for case in cases:
            self._results.setdefault(case.name, [no_number(case.name, "skipped", reason)])

    def _wants_round(self, case: Case, number: int) -> bool:
        found = self._results.get(case.name)
        if found is not None and (case.name in self.settled or number < _rounds_of(found)):
            return False
        if self.has_time_for(case):
            return True
        self._skip([case], "the time that the run had (--within) did not suffice for it")
        return False

    def _round(self, case: Case) -> None:
        started = time.monotonic()
        earlier = self._results.get(case.name)
        try:
            found = self.run(case)
        except KeyboardInterrupt:
            if earlier is None and (found := self.so_far(case)):
                self._results[case.name] = found
            raise
        spent = time.monotonic() - started
        if earlier is None:
            self._results[case.name] = found
        elif not _is_cut_short(found):
            self._results[case.name] = _merged(earlier, found)
        self._write(case, spent)
        self.report(case, self._results[case.name])

    def _write(self, case: Case | None = None, spent_s: float = 0.0) -> None:
        results = [result for results in self._results.values() for result in results]
        *earlier, call = calls_of(self.record)
        if case is not None:
            rounds = call.rounds | {case.name: [*call.rounds.get(case.name, []), spent_s]}
            call = msgspec.structs.replace(call, rounds=rounds)
        self.record = msgspec.structs.replace(self.record, cases=results, calls=[*earlier, call])
        write(self.record, self.path)


def _call_of(record: Record) -> BenchCall:
    return BenchCall(started_at=record.started_at, commit=record.commit, rounds={})


def continued(earlier: Record, now: Record) -> Record:
    """``earlier``, for a run that goes on with it; ``now`` is what is known of that run.

    Raises:
        BenchError: they are not of one kind of machine, software and run; says what differs.
    """
    found = {name: pair for name, pair in what_differs(earlier, now).items() if name not in ("commit", *NOTES)}
    if found:
        differences = "; ".join(f"{name}: {then} there, {here} here" for name, (then, here) in found.items())
        raise BenchError(f"the record was not made like this run, which cannot go on with it: {differences}")
    calls = [*calls_of(earlier), _call_of(now)]
    return noted(msgspec.structs.replace(earlier, calls=calls), now.system.hw_notes)


def calls_of(record: Record) -> list[BenchCall]:
    return record.calls or [_call_of(record)]


def noted(record: Record, note: str | None) -> Record:
    """Return the record with ``note`` beside those that it has."""
    notes = [one for one in (record.system.hw_notes, note) if one]
    system = msgspec.structs.replace(record.system, hw_notes="; ".join(dict.fromkeys(notes)))
    return msgspec.structs.replace(record, system=system)


def _is_open(results: list[CaseResult]) -> bool:
    """No contender has a number, or some have not all of theirs, and another try might give them."""
    if any(CUT_SHORT in result.kinds_of_marks() for result in results):
        return True
    statuses = {result.status for result in results}
    return "pass" not in statuses and bool(statuses.intersection(_NO_NUMBER))


def _is_cut_short(results: list[CaseResult]) -> bool:
    return all(result.status == "skipped" for result in results)


def _rounds_of(results: list[CaseResult]) -> float:
    """Return how many rounds the results are of; infinitely many where there is no further one."""
    return max((len(result.rounds) or 1 for result in results if result.is_repeated), default=float("inf"))


def _merged(earlier: list[CaseResult], later: list[CaseResult]) -> list[CaseResult]:
    """Return all samples of the results that passed in every round, and the failures of the others."""
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
    telemetry = joined(first.telemetry, second.telemetry) if first.telemetry and second.telemetry else first.telemetry
    return msgspec.structs.replace(
        first,
        metrics=metrics,
        rounds=rounds,
        rounds_at=first.rounds_at + second.rounds_at if first.rounds_at and second.rounds_at else [],
        telemetry=telemetry,
        marks=marks(telemetry) if telemetry else [],
    )


# -------------------------------------------------------------------------------------------- the time that it takes

_START_S: dict[Effort, float] = {"quick": 6.0, "standard": 12.0, "full": 20.0}
"""To start the process that forks the others, and to measure the limits where they are not known."""
_ON_DEVICE_S = 2.0
"""Until a new process has an accelerator, beside what the authors say."""
_WHOLE_PROGRAM_S = 60.0
"""A round that takes so long is a whole program's, whose case states its number of runs: it has no second one."""


class _KnownDuration(msgspec.Struct, frozen=True):
    round_s: float
    is_repeated: bool


class Durations:
    """Seconds of each case on one device in runs of one kind. Kept in the cache folder."""

    def __init__(self, device: Device, plan: RunPlan) -> None:
        name = device.name.replace(":", "-")
        self._path = Settings.from_env().cache / f"bench-rounds-{name}-{plan.effort}.json"
        self._plan = plan
        self._known = _read(self._path)
        self._is_host = device.spec.is_host

    def of_round(self, case: Case) -> float:
        known = self._known.get(case.name)
        if known:
            return known.round_s
        return case.estimate_s if self._is_host else case.device_estimate_s or case.estimate_s + _ON_DEVICE_S

    def of(self, case: Case) -> float:
        """Return the seconds of all rounds of a case."""
        known = self._known.get(case.name)
        is_repeated = known.is_repeated if known else case.estimate_s < _WHOLE_PROGRAM_S
        return self.of_round(case) * (self._plan.rounds if is_repeated else 1)

    def total(self, cases: Sequence[Case]) -> float:
        return _START_S[self._plan.effort] + sum(map(self.of, cases))

    def keep(self, record: Record) -> None:
        """Keep what the cases of the last call took. If the cache cannot be written, the next estimate is worse."""
        repeated = {result.name for result in record.cases if result.is_repeated}
        rounds = record.calls[-1].rounds if record.calls else {}
        found = {name: _KnownDuration(statistics.fmean(taken), name in repeated) for name, taken in rounds.items()}
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._path, msgspec.json.encode(self._known | found))


class TimeLimit:
    """The time limit of a run."""

    def __init__(self, minutes: float | None, durations: Durations, started: float) -> None:
        """``minutes`` count from ``started``, by ``time.monotonic``; None: as long as it takes."""
        self._end = None if minutes is None else started + 60 * minutes
        self._durations = durations

    @property
    def left_s(self) -> float | None:
        return None if self._end is None else self._end - time.monotonic()

    def has_time_for(self, case: Case) -> bool:
        """Return whether there is time for a round of the case."""
        return self.left_s is None or self._durations.of_round(case) <= self.left_s


def _read(path: Path) -> dict[str, _KnownDuration]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, _KnownDuration])
    except (OSError, msgspec.DecodeError):
        return {}
