"""Cases in processes of their own: one that hangs, is killed or crashes ends alone, and is reported as what it did.

A child, which runs ``serve``, has imported everything and touches no device: that would break its forks. For each job
it forks a grandchild, which does; so a case begins in milliseconds, on a device that no earlier case has left anything
on. Jobs come to the child as messages on its standard input, answers go as messages to its standard output.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import IO, Literal, Self, TypeVar

import msgspec

from rlcore.bench import steps
from rlcore.bench.case import Case, load_cases
from rlcore.bench.measurement.calibrate import Store, calibrate
from rlcore.bench.measurement.measure import Sampling, SoFar, run_case
from rlcore.bench.measurement.system import new_record
from rlcore.bench.record import Calibration, CaseResult, Effort, Record, no_number
from rlcore.errors import BenchError
from rlcore.process.framing import read_message, take_standard_output, write_message
from rlcore.process.memory_kills import machine_kills
from rlcore.process.message_child import MessageChild
from rlcore.process.python_command import python_command
from rlcore.registry import get_device

_STOP_S = 10.0
_SHOWN = 500
_FORK = multiprocessing.get_context("fork")
_GRACE_S = 3.0
"""Between asking what is late for its stack trace and its end."""

_T = TypeVar("_T")
_encoded = msgspec.json.encode


class CaseJob(msgspec.Struct, frozen=True, kw_only=True):
    do: Literal["describe", "calibrate", "case"]
    device: str
    effort: Effort = "standard"
    case: str = ""
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    timeout_s: float = 600.0


class JobAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A result, or how the process ended without one; before it, what the process is at and has found."""

    step: str = ""
    so_far: bytes = b""
    """The result as JSON if it ended now."""
    body: bytes = b""
    """The result as JSON; empty without one."""
    is_late: bool = False
    code: int = 0
    """The exit code of a process without a result, as ``subprocess`` has it: below 0 the signal that killed it."""


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
        self._command = command or python_command("rlcore.bench.measurement.isolated:serve")
        self._on_step = on_step
        self._steps: list[str] = []
        """The steps of the job that runs, or ran last."""
        self._so_far = b""
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
            left_s: what the run has left; a case that takes longer is ended, and skipped unless it has found something.
        """
        timeout_s = case.timeout_s if left_s is None else max(0.0, min(case.timeout_s, left_s))
        job = CaseJob(do="case", device=self._device_name, case=case.name, sampling=sampling, timeout_s=timeout_s)
        oom_kills = machine_kills()
        answer = self._ask(job)
        if answer.body:
            return _results(answer.body, case)
        if answer.is_late and timeout_s < case.timeout_s:
            if found := self.so_far(case):
                return found
            reason = f"the time that the run had (--within) ended {timeout_s:.0f} s into it{self._at()}"
            return [no_number(case.name, "skipped", reason)]
        if answer.code == -signal.SIGKILL and machine_kills() > oom_kills:
            return [no_number(case.name, "oom", "the system ended its process for want of memory")]
        return [no_number(case.name, "fail", self._how(answer, job))]

    def so_far(self, case: Case) -> list[CaseResult]:
        """Return what ``case``, the last that was asked for, had found when it was ended."""
        return _results(self._so_far, case) if self._so_far else []

    def _or_raise(self, job: CaseJob, kind: type[_T]) -> _T:
        answer = self._ask(job)
        if not answer.body:
            raise BenchError(f"cannot {job.do} the device {self._device_name}: {self._how(answer, job)}")
        return msgspec.json.decode(answer.body, type=kind)

    def _ask(self, job: CaseJob) -> JobAnswer:
        child = self._running_child()
        self._log.seek(0)
        self._log.truncate()
        self._steps, self._so_far, started = [], b"", time.monotonic()
        try:
            child.send(job)
            while (answer := child.receive(JobAnswer)) is not None:
                if answer.so_far:
                    self._so_far = answer.so_far
                    continue
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


def _results(body: bytes, case: Case) -> list[CaseResult]:
    try:
        return msgspec.json.decode(body, type=list[CaseResult])
    except msgspec.ValidationError as error:  # such as a quantity of 0 or NaN, which no record may hold
        return [no_number(case.name, "fail", f"what it found is no result: {error}")]


def with_limits(isolated: Isolated, record: Record, is_forced: bool) -> Record:
    """Return the record with the limits of its machine, measured now where they are absent or stale."""
    store = Store(record)
    calibration = None if is_forced else record.calibration or store.load()
    if calibration is None:
        calibration = isolated.calibrate(record.effort)
        store.save(calibration)
    return msgspec.structs.replace(record, calibration=calibration)


# ---------------------------------------------------------------------------------------------------- the child


def serve(cases: Callable[[], Mapping[str, Case]] = load_cases) -> None:
    """Answer jobs until the input ends; what runs then is killed."""
    answers = take_standard_output()  # what cases print goes to the log
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a case that is killed has printed something, too
    # BLAS has threads by now; it handles forks, which Python cannot know.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    # Grandchildren inherit the answer. Of other threads nothing is told: walking their frames while they run crashes.
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    known = cases()
    while (job := read_message(sys.stdin.buffer, CaseJob)) is not None:
        _say(answers, _forked(job, known, answers))


def _say(answers: IO[bytes], answer: JobAnswer) -> None:
    with contextlib.suppress(BrokenPipeError):
        write_message(answers, answer)


def _forked(job: CaseJob, cases: Mapping[str, Case], answers: IO[bytes]) -> JobAnswer:
    reading, writing = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_work, args=(job, cases, writing, answers))
    process.start()
    writing.close()
    assert process.pid is not None
    try:
        return _outcome(job, process, process.pid, reading)
    finally:
        reading.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started and left behind


def _work(job: CaseJob, cases: Mapping[str, Case], writing: Connection, answers: IO[bytes]) -> None:
    """Do the job in the grandchild; does not return."""
    code = 1
    try:
        os.setsid()
        faulthandler.enable()
        steps.listen(lambda step: _say(answers, JobAnswer(step=step)))  # the child is silent meanwhile
        writing.send_bytes(_result(job, cases, lambda found: _say(answers, JobAnswer(so_far=_encoded(found)))))
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)  # the cleanup at exit is the child's


def _result(job: CaseJob, cases: Mapping[str, Case], so_far: SoFar) -> bytes:
    device = get_device(job.device)
    if job.do == "case":
        return _encoded(run_case(cases[job.case], device, job.sampling, so_far))
    if job.do == "calibrate":
        return _encoded(calibrate(device, job.effort))
    return _encoded(new_record(device, job.effort))


def _outcome(job: CaseJob, process: ForkProcess, pid: int, reading: Connection) -> JobAnswer:
    """Return what the grandchild found, if it did in time; end it then, when it is late, or when the parent has gone.

    One that is late is asked where it is before that. It may crash at that, as frames that are just being made cannot
    be walked, or go on, as a sleep ends by a signal: it is late all the same.
    """
    parent = sys.stdin.fileno()  # only the end of the input comes there while a job runs
    ready = wait([reading, process.sentinel, parent], job.timeout_s)
    body = b""
    if not ready:
        os.kill(pid, signal.SIGUSR1)
        wait([process.sentinel, parent], _GRACE_S)
    elif reading.poll():
        with contextlib.suppress(EOFError):
            body = reading.recv_bytes()
    if body or not ready or parent in ready:
        process.kill()  # one with a result has ended in time, however long its memory takes to be unpinned
    process.join()
    if parent in ready:
        sys.exit(0)
    return JobAnswer(body=body, is_late=not ready, code=process.exitcode or 0)
