"""The table of faults: in which steps each may come, and which errors may come of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from rlcore.chaos import machine_faults, process_faults
from rlcore.chaos.channel import MISCHIEF
from rlcore.chaos.checks import ViolationError, check_error, error_text, require
from rlcore.chaos.damages import DAMAGES
from rlcore.chaos.engines import PATIENT_S
from rlcore.chaos.model import PlannedError
from rlcore.chaos.process_faults import CLOSE_S
from rlcore.chaos.strike import Strike
from rlcore.errors import (
    CheckpointError,
    RlcoreError,
    StateError,
    SyncError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)

_LONGEST_S = {"close": CLOSE_S, "build": 2 * PATIENT_S, "two_savers": 2 * PATIENT_S}
"""The longest that a step may take; 100 s for the others. A deadline within one is ``SHORT_S``."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A row of the table."""

    strike: Callable[[Strike], AbstractContextManager[None]]
    """Inside what it returns the step runs."""
    steps: str
    """The steps that it may meet."""
    errors: tuple[type[RlcoreError], ...] = ()
    """The errors that the step, or the engines' next call, may raise."""
    must_fail: bool = False
    """One of them must come."""
    names_rank: bool = False
    says: str = ""
    """A regular expression that the error's text must match, and ..."""
    says_not: str = ""
    """... must not."""


_OF_WORKERS = "call train generate offload sync save save_in_background load close"
_ALL = f"build {_OF_WORKERS} two_savers list_processes channel"

FAULTS: dict[str, Fault] = {
    "none": Fault(strike=process_faults.nothing, steps=_ALL),
    "kill": Fault(
        strike=process_faults.kill,
        steps=f"build {_OF_WORKERS}",
        errors=(WorkerDiedError, SyncError, CheckpointError, StateError),
        must_fail=True,
        names_rank=True,
        says="SIGKILL",
    ),
    "stop": Fault(
        strike=process_faults.stop,
        steps=_OF_WORKERS,
        errors=(WorkerTimeoutError, SyncError, CheckpointError, StateError),
        must_fail=True,
        names_rank=True,
    ),
    "exception_of_the_user": Fault(
        strike=process_faults.user_exception,
        steps="train",
        errors=(WorkerError,),
        must_fail=True,
        names_rank=True,
        says=PlannedError.__name__,
    ),
    "closed_descriptors": Fault(
        strike=process_faults.closed_descriptors,
        steps="call",
        errors=(WorkerDiedError,),
        must_fail=True,
        names_rank=True,
        says_not="sent by somebody",
    ),
    "no_memory": Fault(
        strike=process_faults.no_memory,
        steps="call",
        errors=(WorkerError,),
        must_fail=True,
        names_rank=True,
        says="(?s)1073741824 bytes were asked for.*Held by rlcore here",
    ),
    "clock_jump": Fault(
        strike=machine_faults.clock_jump, steps="call train generate offload sync save save_in_background load"
    ),
    "connections": Fault(strike=machine_faults.connections, steps="train"),
    "full_disk": Fault(
        strike=machine_faults.full_disk,
        steps="save save_in_background",
        errors=(CheckpointError,),
        must_fail=True,
        names_rank=True,
        says="File too large",
    ),
    "slow_disk": Fault(strike=machine_faults.slow_disk, steps="save save_in_background"),
    "open_folder": Fault(
        strike=machine_faults.open_folder,
        steps="build",
        errors=(StateError,),
        must_fail=True,
        says="(?s)/runtime.*0?700",
    ),
    "foreign_link": Fault(
        strike=machine_faults.foreign_link, steps="build", errors=(StateError,), must_fail=True, says="/runtime"
    ),
    "planted_record": Fault(strike=machine_faults.planted_record, steps="list_processes"),
    **{
        kind: Fault(
            strike=partial(machine_faults.damage, kind),
            steps="load",
            errors=(CheckpointError,),
            must_fail=True,
            says="/checkpoint",
        )
        for kind in DAMAGES
    },
    **{kind: Fault(strike=partial(machine_faults.meddle, kind), steps="channel") for kind in MISCHIEF},
}

PAIRS = [(step, name) for name, fault in FAULTS.items() for step in fault.steps.split()]
"""All steps with the faults that may meet them."""


def judge(fault: Fault, strike: Strike, error: BaseException | None, seconds: float) -> None:
    """Raise ViolationError unless the step ended as the fault's row promises."""
    longest_s = _LONGEST_S.get(strike.step, 100.0)
    require(seconds <= longest_s, f"{strike.step} took {seconds:.0f} s, at most {longest_s:g} s were promised")
    if error is None:
        is_needed = fault.must_fail and strike.has_struck and strike.step != "close"
        require(not is_needed, f"{strike.step} went on as if nothing had happened")
        return
    if not strike.has_struck:
        raise ViolationError(f"{type(error).__name__} came before any fault: {error}") from error
    if not fault.errors:
        raise ViolationError(f"no error was promised, and {type(error).__name__} came: {error_text(error)}") from error
    _check_text(fault, strike, error)


def _check_text(fault: Fault, strike: Strike, error: BaseException) -> None:
    text = error_text(error)
    check_error(error, fault.errors)
    if fault.names_rank:
        blamed = getattr(error, "device", "")  # of errors of workers
        named = blamed == strike.device if blamed else f"rank {strike.rank}" in text or strike.device in text
        require(named, f"rank {strike.rank} ({strike.device}) was struck, and the error blames another: {text}")
    require(re.search(fault.says, text), f"the error does not say {fault.says!r}: {text}")
    wrong = fault.says_not and re.search(fault.says_not, text)
    require(not wrong, f"the error says {fault.says_not!r}, which is not so: {text}")
