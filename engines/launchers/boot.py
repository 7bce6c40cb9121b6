"""How a worker process begins, before it imports anything large: it can show its stack, and ends with its parent."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from rlcore.engines.launchers.traces import record_of, remove_stores_of_the_dead
from rlcore.errors import StateError
from rlcore.settings import Settings


def main(descriptor: int, stack_descriptor: int, parent: int, *, is_parents_python: bool) -> None:
    """Serve the parent at the other end of the socket ``descriptor``; write stacks to ``stack_descriptor``.

    Of a parent with another interpreter nothing is unpickled: its calls are plain data.
    """
    faulthandler.enable(stack_descriptor)
    faulthandler.register(signal.SIGUSR1, file=stack_descriptor, all_threads=True)
    _leave_guard(parent)
    sys.breakpointhook = _refuse_breakpoint
    os.set_inheritable(descriptor, False)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a pipe would hold back a page of lines
    logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
    logging.getLogger("rlcore").setLevel(Settings.from_env().log_level)

    from rlcore.engines.launchers.child import Child
    from rlcore.engines.launchers.plain import load_plain_call
    from rlcore.engines.launchers.wire import Channel, load_call

    Child(Channel(socket.socket(fileno=descriptor)), load_call if is_parents_python else load_plain_call).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Interpreter shutdown can hang in a library's exit handlers; everything of ours is closed.
    os._exit(0)


MARK = "_RLCORE_WORKER_PROCESS"
"""Environment variable that a worker process and all it starts carry, by which they are found when it has ended."""


def _leave_guard(parent: int) -> None:
    """Fork a small process that kills this one and its descendants when the parent, or this one, has ended.

    From outside, because a stopped process or one in a C loop cannot end itself. (The kernel's PR_SET_PDEATHSIG
    spares descendants and speaks of the parent thread.)
    """
    group = os.getpid()  # the parent made it the leader of its own
    watched = [os.pidfd_open(parent), os.pidfd_open(group)]
    if os.getppid() != parent:  # it died before that
        os._exit(1)
    if os.fork() == 0:
        _guard(group, watched)
    for descriptor in watched:
        os.close(descriptor)


def _guard(group: int, watched: list[int]) -> None:
    os.setpgid(0, 0)  # outside the group that it kills
    for entry in list(Path("/proc/self/fd").iterdir()):
        if (descriptor := int(entry.name)) not in watched:
            with contextlib.suppress(OSError):  # the one that listed them is closed
                os.close(descriptor)
    select.select(watched, [], [])
    try:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        while left := _marked():  # in sessions of their own, and what they start meanwhile
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        record_of(group).unlink(missing_ok=True)
        remove_stores_of_the_dead()
    finally:
        os._exit(0)


def _refuse_breakpoint(*_: Any, **__: Any) -> NoReturn:
    raise StateError("breakpoint() in a worker process has no terminal; set RLCORE_DEBUG=pdb to run workers in yours")


def _marked() -> list[int]:
    """Living processes that carry this one's mark."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found
