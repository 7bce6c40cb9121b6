"""The process that forks one process for each job.

Jobs come as messages on standard input, answers go as messages to standard output; both are pipes of the parent
(``isolated.py``). It imports everything before it forks, and never touches a device: that would break the fork.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import IO, Literal

import msgspec

from rlcore.bench import steps
from rlcore.bench.calibrate import calibrate
from rlcore.bench.case import Case, load_cases
from rlcore.bench.measure import run_case
from rlcore.bench.record import Effort
from rlcore.bench.system import new_record
from rlcore.bench.trial import Sampling
from rlcore.process.framing import read_message, take_standard_output, write_message
from rlcore.registry import get_device

_GRACE_S = 3.0
"""Between asking what is late for its stack trace and its end."""


class CaseJob(msgspec.Struct, frozen=True, kw_only=True):
    do: Literal["describe", "calibrate", "case"]
    device: str
    effort: Effort = "standard"
    case: str = ""
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    timeout_s: float = 600.0


class JobAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A result, or how the process ended without one; before it, what the process is at."""

    step: str = ""
    body: bytes = b""
    """The result as JSON; empty without one."""
    is_late: bool = False
    signal: int | None = None
    code: int | None = None

    @property
    def has_result(self) -> bool:
        return bool(self.body)


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
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        steps.listen(lambda step: _say(answers, JobAnswer(step=step)))  # this process is silent meanwhile
        _work(job, cases, writing)
    os.close(writing)
    ended = os.pidfd_open(pid)
    try:
        return _outcome(job, pid, reading, ended)
    finally:
        os.close(reading)
        os.close(ended)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what it started and left behind


def _work(job: CaseJob, cases: Mapping[str, Case], writing: int) -> None:
    """Do the job in the grandchild; does not return."""
    code = 1
    try:
        os.setsid()
        faulthandler.enable()
        with os.fdopen(writing, "wb") as result:  # it has ended in time, however long its memory takes to be unpinned
            result.write(_result(job, cases))
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)  # the cleanup at exit is the child's


def _result(job: CaseJob, cases: Mapping[str, Case]) -> bytes:
    device = get_device(job.device)
    if job.do == "case":
        return msgspec.json.encode(run_case(cases[job.case], device, job.sampling))
    if job.do == "calibrate":
        return msgspec.json.encode(calibrate(device, job.effort))
    return msgspec.json.encode(new_record(device, job.effort))


def _outcome(job: CaseJob, pid: int, reading: int, ended: int) -> JobAnswer:
    """Return what the grandchild wrote, if it ended well and in time; end it when it is late or the parent has gone.

    It is asked where it is before that. It may crash at that, as frames that are just being made cannot be walked, or
    go on, as a sleep ends by a signal: it is late all the same.
    """
    deadline, is_late = time.monotonic() + job.timeout_s, False
    body, parent = bytearray(), sys.stdin.fileno()
    while True:
        ready, _, _ = select.select([reading, parent, ended], [], [], max(0.0, deadline - time.monotonic()))
        if reading in ready and (chunk := os.read(reading, 1 << 20)):
            body += chunk
            continue
        if reading in ready or ended in ready:  # a process it left behind may hold the pipe open
            break
        if not ready and not is_late:
            deadline, is_late = time.monotonic() + _GRACE_S, True
            signal.pidfd_send_signal(ended, signal.SIGUSR1)
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        break
    _, status = os.waitpid(pid, 0)
    if parent in ready:  # only the end of the input comes here while a job runs
        sys.exit(0)
    if is_late:
        return JobAnswer(is_late=True)
    if os.WIFSIGNALED(status):
        return JobAnswer(signal=os.WTERMSIG(status))
    code = os.WEXITSTATUS(status)
    return JobAnswer(body=bytes(body)) if code == 0 and body else JobAnswer(code=code)
