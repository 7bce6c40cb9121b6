"""The process that forks one process for each job.

Jobs come as messages on standard input, answers go as messages to standard output; both are pipes of the parent
(``isolated.py``). It imports everything before it forks, and never touches a device: that would break the fork.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import IO, Literal

import msgspec

from rlcore.bench import steps
from rlcore.bench.calibrate import calibrate
from rlcore.bench.case import Case, load_cases
from rlcore.bench.measure import Sampling, run_case
from rlcore.bench.record import Effort
from rlcore.bench.system import new_record
from rlcore.process.framing import read_message, take_standard_output, write_message
from rlcore.registry import get_device

_FORK = multiprocessing.get_context("fork")
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
    code: int = 0
    """The exit code of a process without a result, as ``subprocess`` has it: below 0 the signal that killed it."""


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
        writing.send_bytes(_result(job, cases))
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
