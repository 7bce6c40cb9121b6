"""Cases that go wrong in every way, and one that does not: for a child process of their own."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from rlcore.bench.case import Case, Contender, Work, expect

SLEEP_S = "1000.17"
"""Of processes that cases leave behind; a number that nobody else sleeps."""


def _case(name: str, run: Callable[[], Any], timeout_s: float = 60.0) -> Case:
    def prepare(device: Any) -> Work:
        contender = Contender(
            implementation=name, run=run, check=lambda output: expect(output == 4, f"2 + 2 is {output}")
        )
        return Work(contenders=(contender,), params={})

    return Case(name=f"faulty/{name}", description="", prepare=prepare, timeout_s=timeout_s)


def _hang() -> None:
    subprocess.Popen(["sleep", SLEEP_S])  # its end is the child's business too
    ctypes.PyDLL(None).sleep(1000)  # keeps Python's lock, as a driver that hangs does


def _leave_behind() -> int:
    subprocess.Popen(["sleep", SLEEP_S])
    return 4


def _say_and_exit() -> None:
    print("the disk is on fire")
    os._exit(3)


def _compute() -> int:
    ones = torch.ones(300, 300)
    return int((ones @ ones)[0, 0].item()) // 75  # needs threads of its own


CASES = {
    case.name: case
    for case in (
        _case("right", lambda: 4),
        _case("compute", _compute),
        _case("wrong", lambda: 5),
        _case("hangs", _hang, timeout_s=1.0),
        _case("killed", lambda: os.kill(os.getpid(), signal.SIGKILL)),
        _case("crashes", lambda: os.kill(os.getpid(), signal.SIGSEGV)),
        _case("exits", _say_and_exit),
        _case("leaves", _leave_behind),
        _case("memory", lambda: torch.empty(2**50, dtype=torch.uint8)),
        _case("slow", lambda: time.sleep(0.5) or 4),
    )
}

if __name__ == "__main__":
    from rlcore.bench.child import serve

    serve(lambda: CASES)
    sys.exit(0)
