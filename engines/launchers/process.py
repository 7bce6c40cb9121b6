"""Runs a worker in a process of its own: one child of the user's process for each device."""

from __future__ import annotations

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
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rlcore.engines.launchers.logs import forward_logs
from rlcore.engines.launchers.wire import Channel, Kind, dump_call, load_answer
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


@dataclass(slots=True)
class _Pending:
    method: str
    future: Future[Any]
    expected: Any
    on_event: Callable[[Any], None] | None


class ProcessWorker:
    """A worker process, its socket, and the calls it has not answered yet."""

    def __init__(self, worker_class: Any, context: WorkerContext, environment: dict[str, str]) -> None:
        self.context = context
        self._worker_class = worker_class
        self._pending: dict[int, _Pending] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._stacks = os.memfd_create("rlcore-stacks", os.MFD_CLOEXEC)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self.process = _spawner().run(lambda: self._popen(theirs.fileno(), environment))
        self._channel = Channel(ours)
        forward_logs(self.process, context)
        threading.Thread(target=self._receive, name=f"rlcore-{context.rank}", daemon=True).start()
        start = _Pending("start", Future(), None, None)
        self.started = self._send("start", ((worker_class, context), {}), start)

    def _popen(self, descriptor: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
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

    # ---------------------------------------------------------------------------------------------- calls

    def call(
        self, method: str, *args: Any, on_event: Callable[[Any], None] | None = None, **kwargs: Any
    ) -> Future[Any]:
        """The future raises WorkerDiedError when the process ends first."""
        pending = _Pending(method, Future(), _returned(self._worker_class, method), on_event)
        return self._send("call", (args, kwargs), pending)

    def _send(self, kind: Kind, arguments: tuple[Any, Any], pending: _Pending) -> Future[Any]:
        body, tensors = dump_call((pending.method, *arguments))
        with self._lock:
            number = next(self._numbers)
            self._pending[number] = pending
            try:
                self._channel.send(kind, number, body, tensors)
            except OSError:
                del self._pending[number]
                pending.future.set_exception(self._death(pending.method))
        return pending.future

    def _receive(self) -> None:
        while (message := self._channel.receive()) is not None:
            envelope, tensors = message
            if envelope.kind == "event":
                pending = self._pending[envelope.call]
                if pending.on_event is not None:
                    pending.on_event(load_answer(envelope.body, tensors, Any))
                continue
            with self._lock:
                pending = self._pending.pop(envelope.call)
            if envelope.kind == "error":
                failure = msgspec.msgpack.decode(envelope.body, type=Failure)
                pending.future.set_exception(raised(failure, self.context, pending.method))
            else:
                pending.future.set_result(load_answer(envelope.body, tensors, pending.expected))
            del message, tensors, pending  # what the user drops is free at once
        self.process.wait()
        with self._lock:
            left, self._pending = self._pending, {}
        for pending in left.values():
            pending.future.set_exception(self._death(pending.method))

    def _death(self, method: str) -> WorkerDiedError:
        code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return WorkerDiedError(rank=self.context.rank, device=self.context.device_name, method=method, how=how)

    # ----------------------------------------------------------------------------------------- end, health

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def stack(self) -> str:
        """What every thread of the worker is doing, or why that cannot be seen."""
        if not self.is_alive:
            return "the process has ended"
        state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            return "the process is stopped (SIGSTOP)"
        before = os.fstat(self._stacks).st_size
        self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_DUMP_S
        while os.fstat(self._stacks).st_size == before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)  # faulthandler writes line by line
        dump = os.pread(self._stacks, os.fstat(self._stacks).st_size, before).decode(errors="replace")
        return dump or f"no stack came within {_STACK_DUMP_S:g} s (process state {state})"

    def ask_to_stop(self) -> None:
        """It ends after the calls it already has."""
        with self._lock, contextlib.suppress(OSError):
            self._channel.send("stop", next(self._numbers), b"", [])

    def kill(self) -> None:
        """End it and all its descendants now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; False if it still lives."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._channel.close()
        os.close(self._stacks)
        return True


@functools.cache
def _returned(worker_class: Any, method: str) -> Any:
    """The annotated type of what a worker method returns: the contract by which its answer is decoded."""
    if "." in method:  # of the user's module
        return Any
    return typing.get_type_hints(getattr(worker_class, method))["return"]


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
