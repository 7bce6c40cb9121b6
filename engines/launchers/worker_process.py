"""A child of the user's process for each device that has workers.

Workers of several engines on one device live in the same child, where they run one after another and can work on each
other's tensors. A worker that asks for it has a child of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import logging
import os
import queue
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rlcore.engines.launchers import running
from rlcore.engines.launchers.interpreter import environment_for
from rlcore.engines.launchers.logs import LogForwarder, PrintLine, print_line
from rlcore.engines.launchers.messages import Kind, MessageHead
from rlcore.engines.launchers.pending_calls import PendingCall, PendingCalls
from rlcore.engines.launchers.pickled_calls import dump_pickled_call
from rlcore.engines.launchers.plain_calls import dump_plain_call
from rlcore.engines.launchers.runtime_files import record_name
from rlcore.engines.launchers.states import GONE, STOPPED
from rlcore.engines.launchers.worker import CurrentCall, WorkerContext
from rlcore.errors import WorkerDiedError
from rlcore.process.endings import crash_report, how_it_ended
from rlcore.process.guard import FAMILY
from rlcore.process.memory_kills import MemoryKills
from rlcore.process.python_command import python_command
from rlcore.process.runtime_folder import RuntimeFolder
from rlcore.process.status import process_name, state_of
from rlcore.process.tensor_channel import TensorChannel

_log = logging.getLogger(__name__)

_MAIN = "rlcore.engines.launchers.worker_main:main"
_STACK_DUMP_S = 1.0
_LAST_LINES_S = 1.0  # for what an ended process wrote to be printed

_NO_DESCRIPTORS = (
    "the process had as many descriptors open as it may; raise the hard limit (ulimit -Hn). If nothing of yours needs "
    "so many, another user of this host may have connected to a listener of gloo's before its ranks were connected"
)

_processes: dict[tuple[str, str, str], WorkerProcess] = {}
"""The child of each (device, owner, other interpreter). The child that workers of a device share has no owner."""
joining = threading.RLock()
"""Held while workers join or leave a child, so that none joins one that is about to end."""


class WorkerProcess:
    """A child process, its socket, and the calls it has not answered yet.

    Args:
        python: another interpreter that runs it; "" is this one.
        print_line: takes each line that it prints.
    """

    def __init__(
        self,
        device_name: str,
        environment: dict[str, str],
        owner: str = "",
        python: str = "",
        print_line: PrintLine = print_line,
    ) -> None:
        self.device_name = device_name
        self._key = device_name, owner, python
        self._dump_call = dump_plain_call if python else dump_pickled_call
        self.parent = os.getpid()
        self._calls = PendingCalls()
        self._is_gone = False
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._engines: dict[int, str] = {}
        self._outgoing: queue.SimpleQueue[tuple[MessageHead, bytes, list[Any]] | None] = queue.SimpleQueue()
        self._label = device_name
        self._last_stack = ""
        self._how = ""
        """How the process has ended, in words."""
        self._ended_because = ""
        with contextlib.ExitStack() as undo:
            self._stacks = os.memfd_create("rlcore-stacks", os.MFD_CLOEXEC)
            undo.callback(os.close, self._stacks)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            undo.callback(ours.close)
            with theirs:
                self._popen = self._spawn(theirs.fileno(), environment, python)
            undo.callback(self._popen.__exit__, None, None, None)
            undo.callback(self._popen.kill)
            self.name = process_name(self.pid)
            self._kills = MemoryKills(Path(f"/proc/{self.pid}/cgroup"))
            self._runtime = RuntimeFolder.open()
            undo.callback(self._runtime.close)
            running.announce(self._runtime, self.pid, device_name, [])
            undo.pop_all()
        self._channel = TensorChannel(ours, MessageHead)
        self._logs = LogForwarder(self._popen, lambda: self._label, print_line)
        self._receiver = self._thread(self._receive)
        self._transmitter = self._thread(self._transmit)
        self._thread(self._watch)

    def _spawn(self, descriptor: int, environment: dict[str, str], python: str) -> subprocess.Popen[bytes]:
        calls = "plain" if python else "pickled"
        if python:
            environment = environment_for(python, environment)
        return subprocess.Popen(
            python_command(_MAIN, descriptor, self._stacks, self.parent, calls, python=python),
            pass_fds=(descriptor, self._stacks),
            env=environment | {FAMILY: f"{self.parent}-{uuid.uuid4().hex}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the user's process alone, which ends its workers in order
        )

    def _thread(self, task: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=task, name=f"rlcore-{self.device_name}", daemon=True)
        thread.start()
        return thread

    @property
    def pid(self) -> int:
        pid: int = self._popen.pid
        return pid

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    @property
    def is_stopped(self) -> bool:
        return state_of(self.pid) == "T"

    # ---------------------------------------------------------------------------------------------- calls

    def start(self, worker_class: object, context: WorkerContext, timeout_s: float) -> tuple[int, Future[Any]]:
        """Start a worker in this process; return its number, and a future that ends when it is ready."""
        number = self.new_worker(context)
        pending = PendingCall(context, "start", timeout_s)
        return number, self.prepare("start", number, ((worker_class, context), {}), pending)()

    def new_worker(self, context: WorkerContext) -> int:
        """Return the number of another worker of this process, which is to be started."""
        number = next(self._numbers)
        self._label = f"{context.rank} {context.device_name}"
        self._engines[number] = context.engine
        self._announce()
        return number

    def _announce(self) -> None:
        with self._lock:  # what is written after the process was seen to end would stay
            if not self._is_gone:
                engines = sorted(set(self._engines.values()))
                running.announce(self._runtime, self.pid, self.device_name, engines)

    def prepare(
        self, kind: Kind, worker: int, arguments: tuple[object, object], pending: PendingCall
    ) -> Callable[[], Future[Any]]:
        """Return a function that queues the call. Its tensors must not change until it is answered."""
        body, tensors = self._dump_call((pending.method, *arguments))
        return lambda: self.queue(kind, worker, body, tensors, pending)

    def queue(self, kind: Kind, worker: int, body: bytes, tensors: list[Any], pending: PendingCall) -> Future[Any]:
        """Send a call whose arguments are encoded. The tensors must not change until it is answered."""
        call = self._calls.add(pending)
        if call is None:
            pending.future.set_exception(self._death(pending, has_begun=False))
        else:
            self._outgoing.put((MessageHead(kind, call, worker), body, tensors))
        return pending.future

    def flush(self) -> None:
        """Send the calls that have been made: each is sent as it is made."""

    @property
    def current(self) -> CurrentCall | None:
        return self._calls.current

    def cancel(self, answer: Future[Any]) -> None:
        """Tell the child that nobody waits for this call any more; the call is still answered."""
        for call in self._calls.numbers_of(answer):
            self._outgoing.put((MessageHead("cancel", call), b"", []))

    def _transmit(self) -> None:
        # A thread of its own: a stopped child does not read, and its callers must still meet their deadlines.
        while (message := self._outgoing.get()) is not None:
            head, body, tensors = message
            try:
                self._channel.send(head, body, tensors)
            except ConnectionError:  # the child is gone: _receive tells every caller
                pass
            except Exception as error:  # no memory or descriptor for the tensors: the caller's to see
                self._calls.fail(head.call, error)
            del message, body, tensors

    def _receive(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                head, body, tensors = message
                self._calls.settle(head.call, head.kind, body, tensors)
                del message, head, body, tensors  # what the user drops is free at once
        except Exception as error:  # such as no descriptor left for a tensor: what follows cannot be read either
            self.kill(f"its answer could not be received: {type(error).__name__}: {error}")
        self._clean_up()

    def _watch(self) -> None:
        self._popen.wait()
        self._channel.shut_down()  # a descendant may hold the child's end of the socket

    def _clean_up(self) -> None:
        code = self._popen.wait()
        self._how = how_it_ended(code, self._kills.explanation())
        self._outgoing.put(None)
        self._transmitter.join()
        if self._popen.returncode == -signal.SIGABRT:
            self._logs.join(_LAST_LINES_S)
        with self._lock:
            self._last_stack = crash_report(self._stack_file())
            self._is_gone = True
            os.close(self._stacks)
            left = self._calls.end()
        self._channel.close()
        self._runtime.remove(record_name(self.pid))
        self._runtime.close()
        for pending in left:
            pending.future.set_exception(self._death(pending))

    def _death(self, pending: PendingCall, *, has_begun: bool = True) -> WorkerDiedError:
        how = f"was ended because {self._ended_because}" if self._ended_because else self._how
        if self._logs.cause_of_abort:
            how += f" ({self._logs.cause_of_abort})"
        error = WorkerDiedError(
            rank=pending.context.rank,
            device=pending.context.device_name,
            method=pending.method,
            how=how,
            has_begun=has_begun,
        )
        if os.strerror(errno.EMFILE) in self._logs.cause_of_abort:
            error.add_note(_NO_DESCRIPTORS)
        if self._last_stack:
            error.traceback = self._last_stack
            error.add_note(self._last_stack)
        return error

    # ----------------------------------------------------------------------------------------- end, health

    def stack(self) -> str:
        """Return the stack of the thread that serves calls, or words that say why it cannot be seen."""
        with self._lock:  # the file is open until the process has been seen to end
            try:
                return GONE if self._is_gone else self._stack()
            except OSError as error:  # no descriptor is left, or it has just ended
                return f"the process cannot be looked at: {error}"

    def _stack(self) -> str:
        state = state_of(self.pid)
        if state == "T":
            return STOPPED
        before = len(self._stack_file())
        self._popen.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_DUMP_S
        while len(self._stack_file()) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)  # faulthandler writes line by line
        dump = self._stack_file()[before:]
        return dump or f"no stack came within {_STACK_DUMP_S:g} s (process state {state})"

    def _stack_file(self) -> str:
        return os.pread(self._stacks, os.fstat(self._stacks).st_size, 0).decode(errors="replace")

    def forget(self, worker: int) -> None:
        """Forget a worker that is asked to close; after the last one the process ends."""
        with joining:
            self._engines.pop(worker, None)
            if self._engines:
                self._announce()
            else:
                self._retire()
                self._outgoing.put((MessageHead("end"), b"", []))

    def kill(self, because: str) -> None:
        """End it now, and its guard ends all its descendants."""
        with joining:
            self._engines.clear()
            self._retire()
            self._ended_because = self._ended_because or because
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _retire(self) -> None:
        """Let the next worker of the device get a new process."""
        if _processes.get(self._key) is self:
            del _processes[self._key]

    def join(self, timeout_s: float) -> bool:
        """Wait for its end if it is to end; return False if it still runs then."""
        if self._engines:  # other workers keep it
            return True
        return self.wait(timeout_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended and all that it wrote is printed; return False if it still runs then."""
        self._receiver.join(timeout_s)
        if self._receiver.is_alive():
            return False
        self._logs.join(_LAST_LINES_S)
        return True


def process_for(
    device_name: str,
    environment: dict[str, str],
    owner: str = "",
    python: str = "",
    print_line: PrintLine = print_line,
) -> WorkerProcess:
    """Return the child for a device, or for one worker of it; start it with ``environment`` if there is none."""
    key = device_name, owner, python
    if key not in _processes or not _processes[key].is_alive:
        _processes[key] = WorkerProcess(device_name, environment, owner, python, print_line)
    return _processes[key]


# A fork of the user's process has no workers, and no thread that could let go of the lock.
os.register_at_fork(after_in_child=_processes.clear)
os.register_at_fork(after_in_child=joining._at_fork_reinit)  # type: ignore[attr-defined]


@atexit.register
def _end_all() -> None:
    """End the processes of engines that the user did not close."""
    processes = list(_processes.values())
    for process in processes:
        process.kill("the user's program ends")
    for process in processes:
        process.join(_STACK_DUMP_S)
