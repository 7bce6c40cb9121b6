"""The program of a round: a process of its own, as a user's would be. It tells its parent of each incident."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import rlcore
from rlcore.chaos.checks import ViolationError, check_checkpoint, left_of, require, strays
from rlcore.chaos.engines import PATIENT_S, Engines
from rlcore.chaos.faults import FAULTS, judge
from rlcore.chaos.model import policy
from rlcore.chaos.plan import Incident, Plan
from rlcore.chaos.steps import STEPS
from rlcore.chaos.strike import Strike
from rlcore.conformance.tiny_model import write_tiny_model
from rlcore.errors import CheckpointError, RlcoreError, one_line
from rlcore.process.framing import read_message, take_standard_output, write_message

INCIDENT_S = 600.0
"""The longest that an incident may take with all its checks."""
_GONE_S = 20.0


class IncidentReport(msgspec.Struct, kw_only=True):
    """A message of the program."""

    kind: str
    """"ready", "begin" or "end" of an incident, "saving" before the program's end, "over"."""
    step: str = ""
    fault: str = ""
    words: str = ""
    """The fault's deed and its moment."""
    outcome: str = ""
    """The error that came of it, in one line; "" if none did."""
    seconds: float = 0.0
    violation: str = ""
    """The promise that was not kept, with the stack; "" if all were."""
    makers: list[int] = []
    """Processes whose shared memory may be left."""


def main(scratch: str) -> None:
    """Run the round that comes over the standard input, in the folder ``scratch``."""
    pipe = take_standard_output()

    def tell(kind: str, **fields: Any) -> None:
        write_message(pipe, IncidentReport(kind=kind, **fields))

    plan = read_message(sys.stdin.buffer, Plan)
    assert plan is not None
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _limit_descriptors()
    folder = Path(scratch)
    engines = Engines(plan.layout, folder)
    if not engines.model.exists():
        heads_of_64 = {"hidden_size": 128} if plan.layout.executor == "vllm" else {}  # vLLM has no smaller ones
        write_tiny_model(engines.model, seed=plan.seed, **heads_of_64)
    engines.build()
    tell("ready", makers=sorted(engines.makers))
    for incident in plan.incidents:
        tell("begin", step=incident.step, fault=incident.fault)
        faulthandler.dump_traceback_later(INCIDENT_S - 10, exit=True)
        end = run(engines, incident)
        faulthandler.cancel_dump_traceback_later()
        tell("end", makers=sorted(engines.makers), **end)
        if end["violation"]:  # what follows would be judged by what is broken
            break
    _end(engines, plan.ending, tell)


def _limit_descriptors() -> None:
    """Set the usual limit of a shell, where a container has a larger one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft > 1024:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))


def run(engines: Engines, incident: Incident) -> dict[str, Any]:
    """Run one incident and check all promises; return the fields of ``IncidentReport``."""
    draw = random.Random(incident.seed)
    strike = Strike(engines, incident.step, draw)
    found: dict[str, Any] = {"step": incident.step, "fault": incident.fault, "outcome": "", "violation": ""}
    started = time.monotonic()
    try:
        if incident.step == "load" or draw.random() < 0.7:
            engines.save()
        error = _meet(strike, incident)
        found["outcome"] = one_line(error) if error else ""
    except ViolationError as violation:
        found["violation"] = str(violation)
    except BaseException as unexpected:
        stack = "".join(traceback.format_exception(unexpected))
        found["violation"] = f"{type(unexpected).__name__} where nothing should fail: {unexpected}\n{stack}"
    return found | {"words": strike.words, "seconds": time.monotonic() - started}


def _meet(strike: Strike, incident: Incident) -> BaseException | None:
    """Let the fault meet the step, judge what came of it, and bring all to order; return the error that came."""
    engines, fault = strike.engines, FAULTS[incident.fault]
    error: BaseException | None = None
    started = time.monotonic()
    try:
        with fault.strike(strike):
            try:
                STEPS[incident.step](engines, strike.draw)
            except Exception as raised:
                error = raised
            seconds = time.monotonic() - started
    except RlcoreError as raised:  # by the fault itself, which may need a worker's help
        error, seconds = raised, time.monotonic() - started
    if isinstance(error, ViolationError):
        raise error
    if incident.step == "close":
        _check_gone(engines)
    error = error or engines.complaint()
    judge(fault, strike, error, seconds)
    with _telling(error):
        engines.recover()
    engines.check_folder()
    engines.check_serving()
    engines.check_whole()
    engines.save()
    return error


@contextlib.contextmanager
def _telling(error: BaseException | None) -> Any:
    try:
        yield
    except RlcoreError as raised:
        raise ViolationError(
            f"after {one_line(error) if error else 'no error'} nothing could go on: {raised}"
        ) from raised


def _check_gone(engines: Engines) -> None:
    deadline = time.monotonic() + _GONE_S
    while left := left_of(engines.scratch, engines.makers, os.getpid()):
        require(time.monotonic() < deadline, f"after close() there are still: {', '.join(left)}")
        time.sleep(0.1)


def _end(engines: Engines, ending: str, tell: Callable[..., None]) -> None:
    if ending == "close":
        engines.close()
    elif ending.startswith("SIG"):  # the parent sends it
        while engines.built:
            number = engines.begin_save()
            tell("saving", makers=sorted(engines.makers))
            engines.train.save(engines.checkpoints, {"number": number}, blocking=False)
    tell("over")


def go_on(scratch: str, device: str) -> None:
    """Be the program that comes after one that was killed: load what it saved, and save."""
    pipe = take_standard_output()
    folder = Path(scratch)
    violation = ""
    with rlcore.meta_device():
        module = policy(folder / "model")
    try:
        with rlcore.TrainEngine(module) as engine:
            engine.build(launcher="inline", devices=device, timeout_s=PATIENT_S)
            if (folder / "checkpoint" / "manifest.json").exists():
                engine.load(folder / "checkpoint")
            engine.save(folder / "checkpoint", {"number": 0})
        check_checkpoint(folder / "checkpoint", [0])
        left = strays(folder / "checkpoint")
        require(not left, f"a save after a kill leaves {', '.join(left)}")
    except Exception as error:
        violation = "".join(traceback.format_exception(error))
    write_message(pipe, IncidentReport(kind="over", violation=violation))


def save_again(scratch: str, device: str, *numbers: str) -> None:
    """Be the other program of ``two_savers``: save the model's weights under these numbers; print how many were."""
    folder = Path(scratch)
    with rlcore.meta_device():
        module = policy(folder / "model")
    num_saved = 0
    with rlcore.TrainEngine(module) as engine:
        engine.build(devices=device, launcher="inline", timeout_s=PATIENT_S)
        print("ready", flush=True)
        sys.stdin.readline()
        for number in numbers:
            with contextlib.suppress(CheckpointError):
                engine.save(folder / "checkpoint", {"number": int(number)})
                num_saved += 1
    print(num_saved)
