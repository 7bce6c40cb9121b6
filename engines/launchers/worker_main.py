"""The start of a worker process, before it imports anything large."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import os
import signal
import socket
import sys
from typing import NoReturn

from rlcore.engines.launchers.runtime_files import record_name, remove_stale_stores
from rlcore.errors import StateError
from rlcore.process import descriptors
from rlcore.process.exporter_socket import remove_stale_sockets
from rlcore.process.guard import leave_guard
from rlcore.process.runtime_folder import runtime_folder
from rlcore.settings import Settings

_QUIET_TRACKERS = "ignore:resource_tracker:UserWarning"
"""Python's resource trackers warn when they remove what a killed process left. The guard counts on that removal."""


def main(descriptor: str, stack_descriptor: str, parent: str, calls: str) -> None:
    """Serve the parent at the other end of the socket ``descriptor``; write stacks to ``stack_descriptor``.

    Args:
        calls: "pickled", or "plain" where the parent runs in another interpreter: then nothing is unpickled.
    """
    stacks = int(stack_descriptor)
    faulthandler.enable(stacks)
    # The main thread alone, which serves the calls. To walk the frames of other threads while they run can end the
    # process by SIGSEGV (python/cpython#116008, #131580).
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), _QUIET_TRACKERS)))
    leave_guard(int(parent), functools.partial(_remove_files, os.getpid()))
    sys.breakpointhook = _refuse_breakpoint
    os.set_inheritable(int(descriptor), False)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a pipe would hold back a page of lines
    logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
    logging.getLogger("rlcore").setLevel(Settings.from_env().log_level)
    descriptors.raise_limit()
    descriptors.watch()

    from rlcore.engines.launchers.pickled_calls import load_pickled_call
    from rlcore.engines.launchers.plain_calls import load_plain_call
    from rlcore.engines.launchers.worker_server import WorkerServer

    load_call = {"pickled": load_pickled_call, "plain": load_plain_call}[calls]
    WorkerServer(socket.socket(fileno=int(descriptor)), load_call).run()
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError, StateError):  # then the guard cannot either
        _remove_files(os.getpid())  # as the guard does, but before those who wait for the end of this process
    # Interpreter shutdown can hang in a library's exit handlers; everything of ours is closed.
    os._exit(0)


def _remove_files(pid: int) -> None:
    with runtime_folder() as folder:
        folder.remove(record_name(pid))
        for name in folder.names(f"ipc-{pid}-*.sock"):  # of exports; the worker's exit handlers do not run
            folder.remove(name)
        remove_stale_stores(folder)
        remove_stale_sockets(folder)  # of the parent too, if it was killed


def _refuse_breakpoint(*_: object, **__: object) -> NoReturn:
    raise StateError("breakpoint() in a worker process has no terminal; set RLCORE_DEBUG=pdb to run workers in yours")
