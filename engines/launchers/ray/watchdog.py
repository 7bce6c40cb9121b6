"""Small processes that end what Ray leaves: a stopped agent, and what outlives a local cluster.

Both are started before anything is wrong, because who has to act is stopped or gone by then.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

MARK = "_RLCORE_RAY_CLUSTER"
"""The variable that all processes of a local cluster inherit."""
_GRACE_S = 5.0


def watch(pid: str, silence_s: str) -> None:
    """Kill a process that writes nothing to this one's standard input for so long; end with it."""
    process = os.pidfd_open(int(pid))
    while True:
        ready, _, _ = select.select([0, process], [], [], float(silence_s))
        if not ready:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            return
        if process in ready or not os.read(0, 4096):
            return


def end_cluster(program: str, mark: str) -> None:
    """Wait for the end of a program, then end what is left of its local cluster ``_GRACE_S`` later."""
    with contextlib.suppress(ProcessLookupError):  # it has ended before this began
        select.select([os.pidfd_open(int(program))], [], [])
    deadline = time.monotonic() + _GRACE_S
    while left := marked(mark):
        if time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def marked(mark: str) -> list[int]:
    """Return the other processes that inherited this mark."""
    variable, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                if variable in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found
