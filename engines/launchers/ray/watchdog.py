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

from rlcore.process.guard import FAMILY

MARK = "_RLCORE_RAY_CLUSTER"
"""The variable that all processes of a local cluster inherit."""
_GRACE_S = 5.0
"""How long the processes of a local cluster get to end by themselves after the program."""
_WORKERS_S = 60.0
"""How long workers get: their guards end them and remove their files when the agent is gone, late on a busy host."""


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
    """Wait for the end of a program, then end what is left of its local cluster: Ray's processes, workers later."""
    with contextlib.suppress(ProcessLookupError):  # it has ended before this began
        select.select([os.pidfd_open(int(program))], [], [])
    ended = time.monotonic()
    while marked(mark):
        waited_s = time.monotonic() - ended
        if waited_s > _GRACE_S:
            for pid in marked(mark, with_workers=waited_s > _WORKERS_S):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def marked(mark: str, *, with_workers: bool = True) -> list[int]:
    """Return the other processes that inherited this mark; those of workers, their guards too, only if asked for."""
    variable, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                variables = (entry / "environ").read_bytes().split(b"\0")
                is_worker = any(one.startswith(f"{FAMILY}=".encode()) for one in variables)
                if variable in variables and (with_workers or not is_worker):
                    found.append(int(entry.name))
    return found
