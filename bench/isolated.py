"""Cases in processes of their own: one that hangs, is killed or crashes ends alone, and is reported as what it did.

A child (``child.py``) has imported everything and touches no device. For each case it forks a grandchild, which does;
so a case begins in milliseconds, on a device that no earlier case has left anything on.
"""

from __future__ import annotations

import re
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from rlcore.bench.calibrate import Store
from rlcore.bench.case import Case
from rlcore.bench.child import CaseJob, JobAnswer
from rlcore.bench.measure import Sampling
from rlcore.bench.record import Calibration, CaseResult, Effort, Record, Status
from rlcore.errors import BenchError
from rlcore.process.memory_kills import machine_kills
from rlcore.process.message_child import MessageChild
from rlcore.process.python_command import python_command

_STOP_S = 10.0
_SHOWN = 500

_T = TypeVar("_T")


def _ignore(step: str) -> None:
    pass


class Isolated:
    """Runs jobs on one device, one after the other. Close it, or use it in a ``with`` statement.

    Args:
        command: what starts the child; without one this project's own, with the modules that this process finds.
        on_step: hears what a case is at as it goes, with the seconds into it.
    """

    def __init__(
        self,
        device_name: str,
        command: Sequence[str] = (),
        on_step: Callable[[str], None] = _ignore,
    ):
        self._device_name = device_name
        self._command = command or python_command("rlcore.bench.child:serve")
        self._on_step = on_step
        self._steps: list[str] = []
        """The steps of the job that runs, or ran last."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        self._child: MessageChild | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends a job that runs."""
        self._end_child()
        self._log.close()

    def new_record(self, effort: Effort) -> Record:
        """Raises BenchError: the device cannot be described."""
        return self._or_raise(CaseJob(do="describe", device=self._device_name, effort=effort), Record)

    def calibrate(self, effort: Effort) -> Calibration:
        return self._or_raise(CaseJob(do="calibrate", device=self._device_name, effort=effort), Calibration)

    def run_case(self, case: Case, sampling: Sampling, left_s: float | None = None) -> list[CaseResult]:
        """Return what ``measure.run_case`` finds; where its process ends before that, one result that says how.

        Args:
            left_s: what the run has left; a case that takes longer is ended, and skipped.
        """
        timeout_s = case.timeout_s if left_s is None else max(0.0, min(case.timeout_s, left_s))
        job = CaseJob(do="case", device=self._device_name, case=case.name, sampling=sampling, timeout_s=timeout_s)
        oom_kills = machine_kills()
        answer = self._ask(job)
        if answer.body:
            return _results(answer, case)
        if answer.is_late and timeout_s < case.timeout_s:
            return [
                _ended(
                    case, "skipped", f"the time that the run had (--within) ended {timeout_s:.0f} s into it{self._at()}"
                )
            ]
        if answer.code == -signal.SIGKILL and machine_kills() > oom_kills:
            return [_ended(case, "oom", "the system ended its process for want of memory")]
        return [_ended(case, "fail", self._how(answer, job))]

    def _or_raise(self, job: CaseJob, kind: type[_T]) -> _T:
        answer = self._ask(job)
        if not answer.body:
            raise BenchError(f"cannot {job.do} the device {self._device_name}: {self._how(answer, job)}")
        return msgspec.json.decode(answer.body, type=kind)

    def _ask(self, job: CaseJob) -> JobAnswer:
        child = self._running_child()
        self._log.seek(0)
        self._log.truncate()
        self._steps, started = [], time.monotonic()
        try:
            child.send(job)
            while (answer := child.receive(JobAnswer)) is not None:
                if not answer.step:
                    return answer
                self._steps.append(f"{time.monotonic() - started:.0f} s {answer.step}")
                self._on_step(self._steps[-1])
        except BrokenPipeError:
            pass
        except BaseException:  # Ctrl-C: the answer would be taken for that of the next job
            self._end_child()
            raise
        return JobAnswer(code=self._end_child())

    def _running_child(self) -> MessageChild:
        if self._child is None:
            self._child = MessageChild(self._command, errors=self._log, has_own_session=True)
        return self._child

    def _end_child(self) -> int:
        """It ends itself and its grandchild when its input ends."""
        child, self._child = self._child, None
        return 0 if child is None else child.close(_STOP_S)

    def _at(self) -> str:
        """Return the steps that the job had begun, in words."""
        return f"; it had begun: {', '.join(self._steps)}" if self._steps else ""

    def _how(self, answer: JobAnswer, job: CaseJob) -> str:
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip()
        if answer.is_late:
            place = re.search(r'most recent call first\):\n  File "(.*)", line (\d+) in (\S+)', said)
            where = f"; it was in {place[3]} ({Path(place[1]).name}:{place[2]})" if place else ""
            return f"it hung: it did not end within {job.timeout_s:g} s{where}{self._at()}"
        fatal = said.rfind("Fatal Python error")
        shown = said[fatal:][:_SHOWN] if fatal >= 0 else said[-_SHOWN:]
        last = f": {shown}" if shown else ""
        if answer.code < 0:
            return f"its process was killed by {signal.Signals(-answer.code).name}{self._at()}{last}"
        return f"its process ended with exit code {answer.code}{last}"


def _results(answer: JobAnswer, case: Case) -> list[CaseResult]:
    try:
        return msgspec.json.decode(answer.body, type=list[CaseResult])
    except msgspec.ValidationError as error:  # such as a quantity of 0 or NaN, which no record may hold
        return [_ended(case, "fail", f"what it found is no result: {error}")]


def _ended(case: Case, status: Status, reason: str) -> CaseResult:
    return CaseResult(name=case.name, implementation="", status=status, params={}, reason=reason)


def with_limits(isolated: Isolated, record: Record, is_forced: bool) -> Record:
    """The record with the limits of its machine, measured now where they are absent or stale."""
    store = Store(record)
    calibration = None if is_forced else record.calibration or store.load()
    if calibration is None:
        calibration = isolated.calibrate(record.effort)
        store.save(calibration)
    return msgspec.structs.replace(record, calibration=calibration)
