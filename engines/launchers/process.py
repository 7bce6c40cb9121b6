"""Runs workers in processes of their own: one child of the user's process for each device.

Workers of several engines on one device live in the same child, take turns in it, and can work on each other's
tensors there.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import typing
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rlcore.engines.launchers import living
from rlcore.engines.launchers.logs import forward_logs
from rlcore.engines.launchers.wire import Channel, Kind, WorkerReference, dump_call, load_answer
from rlcore.engines.launchers.worker import Failure, WorkerContext, raised
from rlcore.errors import WorkerDiedError

# The child's first act is to look where its parent looks: rlcore may have been found through sys.path alone.
_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[4])
from rlcore.engines.launchers.child import main
main(*map(int, sys.argv[1:4]))
"""
_STACK_DUMP_S = 1.0


@dataclass(frozen=True, slots=True)
class _Pending:
    """A call that has not been answered."""

    context: WorkerContext
    method: str
    expected: Any
    future: Future[Any]
    on_event: Callable[[Any], None] | None


class DeviceProcess:
    """A child process, its socket, and the calls it has not answered yet."""

    def __init__(self, device_name: str, environment: dict[str, str]) -> None:
        self.device_name = device_name
        self._pending: dict[int, _Pending] = {}
        self._is_gone = False
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._engines: dict[int, str] = {}
        self._outgoing: queue.SimpleQueue[tuple[Kind, int, int, bytes, list[Any]] | None] = queue.SimpleQueue()
        self._label = device_name
        self._stacks = os.memfd_create("rlcore-stacks", os.MFD_CLOEXEC)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._popen = _spawner().run(lambda: self._spawn(theirs.fileno(), environment))
        self._channel = Channel(ours)
        self._living = living.announce(self.pid, device_name, [])
        forward_logs(self._popen, lambda: self._label)
        for task in (self._receive, self._transmit):
            threading.Thread(target=task, name=f"rlcore-{device_name}", daemon=True).start()

    def _spawn(self, descriptor: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        arguments = [str(descriptor), str(self._stacks), str(os.getpid()), json.dumps(sys.path)]
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments],
            pass_fds=(descriptor, self._stacks),
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the user's process alone, which ends its workers in order
        )

    @property
    def pid(self) -> int:
        pid: int = self._popen.pid
        return pid

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    # ---------------------------------------------------------------------------------------------- calls

    def start(self, worker_class: Any, context: WorkerContext) -> tuple[int, Future[Any]]:
        """A new worker in this process: its number, and its readiness."""
        number = next(self._numbers)
        self._label = f"{context.rank} {self.device_name}"
        self._engines[number] = context.engine
        living.announce(self.pid, self.device_name, sorted(set(self._engines.values())))
        pending = _Pending(context, "start", None, Future(), None)
        return number, self.send("start", number, ((worker_class, context), {}), pending)

    def send(self, kind: Kind, worker: int, arguments: tuple[Any, Any], pending: _Pending) -> Future[Any]:
        """Queue a call. Its tensors must stay as they are until it is answered."""
        body, tensors = dump_call((pending.method, *arguments))
        with self._lock:
            if self._is_gone:
                pending.future.set_exception(self._death(pending))
                return pending.future
            call = next(self._numbers)
            self._pending[call] = pending
        self._outgoing.put((kind, call, worker, body, tensors))
        return pending.future

    def _transmit(self) -> None:
        # A thread of its own: a stopped child does not read, and whoever calls it must still meet his deadline.
        while (message := self._outgoing.get()) is not None:
            kind, call, worker, body, tensors = message
            with contextlib.suppress(OSError):  # the child is gone: _receive tells every caller
                self._channel.send(kind, call, body, worker=worker, tensors=tensors)
            del message, body, tensors

    def _receive(self) -> None:
        while (message := self._channel.receive()) is not None:
            envelope, tensors = message
            is_last = envelope.kind != "event"
            with self._lock:
                pending = self._pending.pop(envelope.call) if is_last else self._pending[envelope.call]
            try:
                _answer(pending, envelope.kind, envelope.body, tensors)
            except Exception as error:  # a progress callback, or an answer unlike its annotation: the caller's to see
                self._pending.pop(envelope.call, None)
                pending.future.set_exception(error)
            del message, tensors, pending  # what the user drops is free at once
        self._popen.wait()
        self._outgoing.put(None)
        with self._lock:
            self._is_gone = True
            left, self._pending = self._pending, {}
        self._living.path.unlink(missing_ok=True)
        for pending in left.values():
            pending.future.set_exception(self._death(pending))

    def _death(self, pending: _Pending) -> WorkerDiedError:
        code = self._popen.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return WorkerDiedError(rank=pending.context.rank, device=self.device_name, method=pending.method, how=how)

    # ----------------------------------------------------------------------------------------- end, health

    def stack(self) -> str:
        """What every thread of the process is doing, or why that cannot be seen."""
        if not self.is_alive:
            return "the process has ended"
        state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            return "the process is stopped (SIGSTOP)"
        before = os.fstat(self._stacks).st_size
        self._popen.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_DUMP_S
        while os.fstat(self._stacks).st_size == before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)  # faulthandler writes line by line
        dump = os.pread(self._stacks, os.fstat(self._stacks).st_size, before).decode(errors="replace")
        return dump or f"no stack came within {_STACK_DUMP_S:g} s (process state {state})"

    def forget(self, worker: int) -> None:
        """One worker has closed; with the last the process ends."""
        self._engines.pop(worker, None)
        if not self._engines:
            _retire(self)
            self._outgoing.put(("end", 0, 0, b"", []))

    def kill(self) -> None:
        """End it and all its descendants now."""
        _retire(self)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def join(self, timeout_s: float) -> bool:
        """Wait for its end if it is to end; False if it still lives then."""
        if self._engines and self.is_alive:
            return True  # other workers keep it
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        with self._lock:
            stacks, self._stacks = self._stacks, -1
        if stacks >= 0:
            os.close(stacks)
            self._channel.close()
        return True


class ProcessWorker:
    """A worker in a child process."""

    def __init__(self, process: DeviceProcess, worker_class: Any, context: WorkerContext) -> None:
        self.context = context
        self._process = process
        self._worker_class = worker_class
        self._closed: Future[Any] | None = None
        self._number, self.started = process.start(worker_class, context)

    @property
    def process_id(self) -> int:
        return self._process.pid

    def call(
        self, method: str, *args: Any, on_event: Callable[[Any], None] | None = None, **kwargs: Any
    ) -> Future[Any]:
        """The future raises WorkerDiedError when the process ends first."""
        sent = [WorkerReference(arg._number) if isinstance(arg, ProcessWorker) else arg for arg in args]
        pending = _Pending(self.context, method, _returned(self._worker_class, method), Future(), on_event)
        return self._process.send("call", self._number, (sent, kwargs), pending)

    def stack(self) -> str:
        return self._process.stack()

    def ask_to_stop(self) -> None:
        self._closed = self.call("close")
        self._closed.add_done_callback(lambda _: self._process.forget(self._number))

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        if self._closed is not None and not wait([self._closed], timeout_s).done:
            return False
        return self._process.join(max(0.0, deadline - time.monotonic()))


def _answer(pending: _Pending, kind: Kind, body: bytes, tensors: list[Any]) -> None:
    if kind == "event":
        if pending.on_event is not None:
            pending.on_event(load_answer(body, tensors, Any))
    elif kind == "error":
        failure = msgspec.msgpack.decode(body, type=Failure)
        pending.future.set_exception(raised(failure, pending.context, pending.method))
    else:
        pending.future.set_result(load_answer(body, tensors, pending.expected))


@functools.cache
def _returned(worker_class: Any, method: str) -> Any:
    """The annotated type of what a worker method returns: the contract by which its answer is decoded."""
    if "." in method:  # of the user's module
        return Any
    return typing.get_type_hints(getattr(worker_class, method))["return"]


_processes: dict[str, DeviceProcess] = {}
"""The child of each device that has workers."""


def process_for(device_name: str, environment: dict[str, str]) -> DeviceProcess:
    """The child that owns a device, started if there is none."""
    if device_name not in _processes or not _processes[device_name].is_alive:
        _processes[device_name] = DeviceProcess(device_name, environment)
    return _processes[device_name]


def _retire(process: DeviceProcess) -> None:
    """The next worker of its device gets a new process."""
    if _processes.get(process.device_name) is process:
        del _processes[process.device_name]


@atexit.register
def _end_all() -> None:
    """Engines that the user did not close."""
    for process in list(_processes.values()):
        process.kill()


class _Spawner:
    """One thread that lives as long as the process and starts every child.

    The kernel's "kill me when my parent dies" speaks of the parent *thread* (prctl(2), PR_SET_PDEATHSIG).
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="rlcore-spawn", daemon=True).start()

    def run(self, task: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._tasks.put((task, future))
        return future.result()

    def _serve(self) -> None:
        while True:
            task, future = self._tasks.get()
            try:
                future.set_result(task())
            except Exception as error:  # raised again in the thread that asked
                future.set_exception(error)


@functools.cache
def _spawner() -> _Spawner:
    return _Spawner()
