"""The agent of a host: an actor that runs rlcore's own process launcher there, for one program.

Its workers are its children, as they are the user's program's under the launcher "process": guard, shared memory,
stacks and engines that share a device are the same. All of its methods return at once or within seconds, and run in
threads, so that a worker can be looked at and ended while it computes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import shutil
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec

import msgspec
from torch import Tensor

from rlcore import __version__
from rlcore.engines.launchers.failures import describe
from rlcore.engines.launchers.messages import Kind
from rlcore.engines.launchers.pending_calls import PendingCall
from rlcore.engines.launchers.process import in_front, owner_of, worker_environment
from rlcore.engines.launchers.ray._ray_private import has_token
from rlcore.engines.launchers.ray.actor_store import STORE_SOCKET
from rlcore.engines.launchers.ray.heartbeat import BEAT_S, LOOK_S, NEXT_BEAT_S, START_S
from rlcore.engines.launchers.ray.placement import split_name
from rlcore.engines.launchers.ray.store_socket import StoreSocket
from rlcore.engines.launchers.ray.wire import (
    AgentAnswer,
    HostFacts,
    Opened,
    Opening,
    Posted,
    PostedBatch,
    Said,
    contiguous,
    decoded,
    encoded,
    plain_tensor,
    viewed,
)
from rlcore.engines.launchers.runtime_files import new_store
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.launchers.worker_process import WorkerProcess, joining, process_for
from rlcore.process.network_interface import interface_variables
from rlcore.process.python_command import python_command
from rlcore.process.status import boot_id, pid_namespace
from rlcore.settings import Settings

_POLL_S = 60.0
"""How long ``receive`` waits for something: a program with many hosts spends time on each that has nothing to say."""
_BATCH_BYTES = 64 << 20

P = ParamSpec("P")


def _answered(method: Callable[Concatenate[Any, P], bytes]) -> Callable[Concatenate[Any, P], bytes]:
    """Return the error of a method as plain data: Ray would have the program unpickle it."""

    @functools.wraps(method)
    def answer(self: Any, *args: P.args, **kwargs: P.kwargs) -> bytes:
        try:
            return encoded(AgentAnswer(method(self, *args, **kwargs)))
        except Exception as error:
            return encoded(AgentAnswer(failure=describe(error)))

    return answer  # type: ignore[return-value]  # mypy takes a wrapped method for one that is bound by name


@dataclass(frozen=True, slots=True)
class RelayedCall(PendingCall):
    """A call of the program: what the worker answers is handed on as it came."""

    say: Callable[[Kind, bytes, list[Tensor]], None] = field(kw_only=True)

    def settle(self, kind: Kind, body: bytes, tensors: list[Any]) -> None:
        self.say(kind, body, contiguous(tensors))
        if kind != "event":
            self.future.set_result(None)


class Agent:
    """The agent. ``receive`` and ``beat`` are called all the time; when ``beat`` is not, the agent ends."""

    def __init__(self) -> None:
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # of tensors that are only read
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's own, which is 1: workers divide the host's processors
        self._said: queue.SimpleQueue[tuple[Said, list[Tensor]]] = queue.SimpleQueue()
        self._processes: dict[int, WorkerProcess] = {}
        self._numbers: dict[str, int] = {}
        self._contexts: dict[tuple[int, int], WorkerContext] = {}
        self._calls: dict[tuple[int, int], Any] = {}
        self._early: dict[int, tuple[list[Posted], list[Any]]] = {}
        self._next = 0
        self._taking = threading.Lock()
        self._heard = time.monotonic() + START_S - NEXT_BEAT_S  # the program may wait for other hosts first
        self._store: StoreSocket | None = None
        self._store_path = new_store() / "store.sock"
        # It waits a little longer than the program, which can say what it saw.
        command = python_command("rlcore.engines.launchers.ray.watchdog:watch", os.getpid(), NEXT_BEAT_S + 2 * LOOK_S)
        self._watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        threading.Thread(target=self._live, name="rlcore-agent", daemon=True).start()

    def _live(self) -> None:
        assert self._watchdog.stdin is not None
        while time.monotonic() - self._heard < NEXT_BEAT_S:
            with contextlib.suppress(OSError):  # somebody has ended the watchdog
                os.write(self._watchdog.stdin.fileno(), b".")
            time.sleep(LOOK_S)
        os._exit(1)  # the program is gone, or cut off: the guards end the workers

    # ---------------------------------------------------------------------------------------------- answers

    @_answered
    def facts(self) -> bytes:
        """Return ``HostFacts``."""
        return encoded(
            HostFacts(
                pid=os.getpid(),
                machine=f"{boot_id()}/{pid_namespace()}",
                rlcore_version=__version__,
                has_token=has_token(),
            )
        )

    def beat(self, known: list[int]) -> bytes:
        """Return the numbers of the processes that are stopped (SIGSTOP): once they are not the known ones, or later.

        ``BEAT_S`` later in any case. The program learns by the answer that this host lives.
        """
        self._heard = time.monotonic()
        while (found := self._stopped()) == known and time.monotonic() < self._heard + BEAT_S:
            time.sleep(LOOK_S)
        return encoded(found)

    def _stopped(self) -> list[int]:
        return [number for number, process in list(self._processes.items()) if process.is_stopped]

    def receive(self) -> bytes:
        """Return what has been said since the last time; wait ``_POLL_S`` for something."""
        found: list[tuple[Said, list[Tensor]]] = []
        nbytes = 0
        try:
            found.append(self._said.get(timeout=_POLL_S))
            while (nbytes := nbytes + _size(*found[-1])) < _BATCH_BYTES:
                found.append(self._said.get_nowait())
        except queue.Empty:
            pass
        return encoded(
            [msgspec.structs.replace(said, tensors=list(map(plain_tensor, tensors))) for said, tensors in found]
        )

    @_answered
    def new_store(self) -> bytes:
        """Return the path of a new folder through which workers of this host find each other."""
        return str(new_store()).encode()

    @_answered
    def remove_store(self, path: str) -> bytes:
        shutil.rmtree(path, ignore_errors=True)
        return b""

    @_answered
    def use_store(self, actor: Any) -> bytes:
        """Take the workers' questions to this store actor, which may take the place of one that has died."""
        with self._taking:
            if self._store is None:
                self._store = StoreSocket(self._store_path, actor)
            self._store.actor = actor
        return b""

    @_answered
    def stack(self, process: int) -> bytes:
        return self._processes[process].stack().encode()

    @_answered
    def kill(self, process: int, because: str) -> bytes:
        self._processes[process].kill(because)
        return b""

    # ---------------------------------------------------------------------------------------------- workers

    @_answered
    def open(self, request: bytes) -> bytes:
        """Take a list of ``Opening``; return ``Opened`` for each, the process of a worker that a message will start."""
        opened: list[Opened] = []
        try:
            for opening in decoded(request, list[Opening], "request"):
                opened.append(self._open(opening))
        except BaseException:
            for one in opened:
                self._processes[one.process].forget(one.worker)
            raise
        return encoded(opened)

    def _open(self, opening: Opening) -> Opened:
        local = tuple(split_name(name)[1] for name in opening.devices)
        local_name, order = in_front(local) if opening.owns_process else ("", {})
        context = WorkerContext(
            opening.engine, opening.rank, opening.world_size, opening.devices[0], opening.number, opening.devices
        )
        with joining:
            owner = owner_of(context) if opening.owns_process else ""
            environment = _environment(opening) | order | {STORE_SOCKET: str(self._store_path)}
            process = process_for(local[0], environment, owner, opening.python, self._print_line)
            number = self._number_of(process)
            worker = process.new_worker(context)
            self._contexts[number, worker] = context
        return Opened(
            process=number,
            worker=worker,
            pid=process.pid,
            name=process.name,
            local_name=local_name or local[0],
        )

    def _number_of(self, process: WorkerProcess) -> int:
        if process.name not in self._numbers:
            number = self._numbers[process.name] = len(self._numbers)
            self._processes[number] = process
            threading.Thread(target=self._wait_for_end, args=(number, process), daemon=True).start()
        return self._numbers[process.name]

    def _wait_for_end(self, number: int, process: WorkerProcess) -> None:
        process.wait()
        self._said.put((Said("ended", number), []))

    def _print_line(self, label: str, text: str, end: str) -> None:
        self._said.put((Said("line", 0, body=encoded((label, text, end))), []))

    def post(self, head: bytes, buffers: list[Any]) -> None:
        """Take an encoded ``PostedBatch``, after all that were posted before it; the buffers are bytes of tensors."""
        batch = decoded(head, PostedBatch, "batch of messages")
        with self._taking:
            self._early[batch.order] = batch.messages, buffers
            while (early := self._early.pop(self._next, None)) is not None:
                self._next += 1
                for posted in early[0]:
                    self._take(posted, early[1])

    def _take(self, posted: Posted, buffers: list[Any]) -> None:
        process = self._processes[posted.process]
        if posted.kind == "forget":
            process.forget(posted.worker)
        elif posted.kind == "cancel":
            if (answer := self._calls.get((posted.process, posted.call))) is not None:
                process.cancel(answer)
        else:
            try:
                self._call(process, posted, buffers)
            except Exception as error:  # the caller must hear of it, and what was posted later must go on
                self._said.put((Said("error", posted.process, posted.call, encoded(describe(error))), []))

    def _call(self, process: WorkerProcess, posted: Posted, buffers: list[Any]) -> None:
        key = posted.process, posted.call

        def say(kind: Kind, answer: bytes, beside: list[Tensor]) -> None:
            self._said.put((Said(kind, *key, answer), beside))

        context = self._contexts[posted.process, posted.worker]
        pending = RelayedCall(context, posted.method, 0.0, say=say)
        self._calls[key] = pending.future

        def done(future: Any) -> None:
            self._calls.pop(key, None)
            if (error := future.exception()) is not None:  # the process has ended, or the call could not be sent
                say("error", encoded(describe(error)), [])

        pending.future.add_done_callback(done)
        kind: Any = posted.kind
        given = [viewed(dtype, shape, memoryview(buffers[place])) for dtype, shape, place in posted.tensors]
        process.queue(kind, posted.worker, posted.body, given, pending)


def _size(said: Said, tensors: list[Tensor]) -> int:
    return len(said.body) + sum(one.nbytes for one in tensors)


def _environment(opening: Opening) -> dict[str, str]:
    """Return the variables of a worker process: the program's, then this host's, then what rlcore would choose."""
    chosen = worker_environment(opening.on_this_host, owns_process=opening.owns_process)
    if opening.interface:
        chosen |= interface_variables(opening.interface)
    own = {"RLCORE_RUNTIME": str(Settings.from_env().runtime)}  # where this agent keeps the files of its workers
    return chosen | os.environ | opening.environment | own
