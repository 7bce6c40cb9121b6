"""Cases that go wrong in every way, and one that does not: for a child process of their own."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlcore.bench import steps
from rlcore.bench.case import Case, Contender, Quantity, Work, expect

SLEEP_S = os.environ.setdefault("FAULTY_CASES_SLEEP", f"1000.{os.getpid()}")
"""Of processes that cases leave behind; a number that nobody else sleeps, and the same in all processes of a test."""

HANGS_S = 3.0
"""The deadline of the one that hangs: on however busy a machine it hangs by then."""

GROUP = "FAULTY_CASES_GROUP"
"""The environment variable with the folder of a control group in which there is little memory."""


def _case(name: str, run: Callable[[], Any], timeout_s: float = 60.0) -> Case:
    def prepare(device: Any) -> Work:
        contender = Contender(
            implementation=name, run=run, check=lambda output: expect(output == 4, f"2 + 2 is {output}")
        )
        return Work(contenders=(contender,), params={})

    return Case(name=f"faulty/{name}", description="", prepare=prepare, timeout_s=timeout_s)


def _hang() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()  # is elsewhere, and nobody's concern
    subprocess.Popen(["sleep", SLEEP_S])  # its end is the child's business too
    ctypes.PyDLL(None).sleep(1000)  # keeps Python's lock, as a driver that hangs does


def _crash_when_asked() -> None:
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGSEGV))
    while True:
        pass


def _leave_behind() -> int:
    subprocess.Popen(["sleep", SLEEP_S])
    return 4


def _say_and_exit() -> None:
    print("the disk is on fire")
    os._exit(3)


def _begin_and_die() -> None:
    steps.begin("the second thing")
    os.kill(os.getpid(), signal.SIGKILL)


def _prepare_in_steps(device: Any) -> Work:
    steps.begin("the first thing")
    contender = Contender(implementation="dies", run=_begin_and_die, check=lambda output: None)
    return Work(contenders=(contender,), params={}, num_runs=1)


def _prepare_in_turns(device: Any) -> Work:
    ways = {"ends": lambda: 4, "hangs": lambda: time.sleep(1000), "comes_later": lambda: 4}
    contenders = (Contender(implementation=name, run=run, check=lambda output: None) for name, run in ways.items())
    return Work(contenders=tuple(contenders), params={}, num_runs=3)


def _compute() -> int:
    ones = torch.ones(300, 300)
    return int((ones @ ones)[0, 0].item()) // 75  # needs threads of its own


def _need_more_than_there_is() -> int:
    Path(os.environ[GROUP], "cgroup.procs").write_text(str(os.getpid()))
    return len(b"x" * (1 << 28)) >> 26


def _break() -> None:
    raise IndexError("list index out of range")


def _prepared(name: str, prepare: Callable[[Any], Any]) -> Case:
    return Case(name=f"faulty/{name}", description="", prepare=prepare, timeout_s=60.0)


def _work(params: dict[str, Any], **options: Any) -> Work:
    nothing = Quantity(options.pop("quantity", 1.0), "B")
    contender = Contender(
        implementation="x", run=lambda: 4, check=lambda output: None, quantities=lambda output: {"found": nothing}
    )
    return Work(contenders=(contender,), params=params, **options)


CASES = {
    case.name: case
    for case in (
        _case("hungry", _need_more_than_there_is),
        _case("exits_well", lambda: os._exit(0)),
        _prepared("raises", lambda device: _break()),
        _prepared("prepares_nothing", lambda device: None),
        _prepared("repeats_a_name", lambda device: Work(contenders=_work({}).contenders * 2, params={})),
        _prepared("finds_zero", lambda device: _work({}, quantity=0.0)),
        _prepared("finds_nan", lambda device: _work({}, quantity=float("nan"))),
        _prepared("no_sizes", lambda device: _work({"T": None})),
        _prepared("odd_sizes", lambda device: _work({"T": torch.ones(1)})),
        _prepared("cannot_close", lambda device: _work({}, close=_break)),
        _prepared("in_steps", _prepare_in_steps),
        _prepared("in_turns", _prepare_in_turns),
        _case("right", lambda: 4),
        _case("compute", _compute),
        _case("wrong", lambda: 5),
        _case("hangs", _hang, timeout_s=HANGS_S),
        _case("crashes_when_asked", _crash_when_asked),
        _case("killed", lambda: os.kill(os.getpid(), signal.SIGKILL)),
        _case("crashes", lambda: os.kill(os.getpid(), signal.SIGSEGV)),
        _case("exits", _say_and_exit),
        _case("leaves", _leave_behind),
        _case("memory", lambda: torch.empty(2**50, dtype=torch.uint8)),
        _case("slow", lambda: time.sleep(60) or 4),
    )
}

if __name__ == "__main__":
    from rlcore.bench.measurement.isolated import serve

    serve(lambda: CASES)
    sys.exit(0)
