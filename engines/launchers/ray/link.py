"""The way between the user's program and the agent of one host.

When the agent ends, or does not answer any more, the host is lost: every call to a worker there fails with one error,
and nothing is tried again, as a train step may have run.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlcore.engines.launchers.logs import print_line
from rlcore.engines.launchers.ray._ray_private import plain_bytes
from rlcore.engines.launchers.ray.agent import Agent
from rlcore.engines.launchers.ray.agent_link import AgentLink
from rlcore.engines.launchers.ray.heartbeat import START_S, Heartbeat
from rlcore.engines.launchers.ray.outbox import Outbox
from rlcore.engines.launchers.ray.remote_process import RemoteProcess
from rlcore.engines.launchers.ray.wire import (
    AgentAnswer,
    HostFacts,
    Opened,
    Opening,
    Posted,
    Said,
    decoded,
    encoded,
    tensor_of,
)
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.errors import InvalidInputError, StateError, first_line
from rlcore.process.status import boot_id, pid_namespace

if TYPE_CHECKING:
    from rlcore.engines.launchers.failures import WorkerFailure

ASK_S = 10.0
_STACK_S = 5.0
_END_S = 2.0
"""How long an agent of this machine gets to end when Ray ends it."""


class HostLink(AgentLink):
    """The agent of a host, as the program sees it.

    Args:
        actor: Ray's handle of the agent.
        on_loss: called once when the host is lost.
        is_own_node: Ray has started the agent on the program's own node.
    """

    def __init__(
        self, host: str, actor: Any, on_loss: Callable[[HostLink], None], *, is_own_node: bool = False
    ) -> None:
        self.host = host
        self._actor = actor
        self._on_loss = on_loss
        self._processes: dict[int, RemoteProcess] = {}
        self._lock = threading.RLock()
        self._ended_early: set[int] = set()
        self._outbox = Outbox(self._send)
        self.why_lost = ""
        self.facts = decoded(self._value(self.ask_plain(Agent.facts, timeout_s=START_S)), HostFacts, "facts")
        # What an agent says of itself is believed on the program's own node alone: its process is ended by its id.
        self.is_here = is_own_node and self.facts.machine == f"{boot_id()}/{pid_namespace()}"
        """The agent runs beside the program, with whose environment it starts workers."""
        self._agent_process = os.pidfd_open(self.facts.pid) if self.is_here else None
        self._store: Any = None
        self._heartbeat = Heartbeat(self)
        threading.Thread(target=self._receive, name=f"rlcore-{host}", daemon=True).start()

    # ---------------------------------------------------------------------------------------------- asking

    def ask(self, method: Callable[..., bytes], *arguments: Any, timeout_s: float = ASK_S) -> bytes:
        """Call a method of the agent, and return its answer.

        Raises:
            StateError: the host is lost, or does not answer in time.
            RlcoreError: what the agent raised.
        """
        try:
            return self._value(self.ask_plain(method, *arguments, timeout_s=timeout_s))
        except StateError as error:
            raise StateError(f"host {self.host}: {error}") from error

    def _value(self, data: bytes | memoryview) -> bytes:
        outcome = decoded(data, AgentAnswer, "answer")
        if outcome.failure is not None:
            raise _error_of(outcome.failure, self.host)
        return outcome.value

    def ask_plain(self, method: Callable[..., bytes], *arguments: Any, timeout_s: float | None) -> bytes | memoryview:
        """Call a method that returns plain bytes; None waits for as long as the agent lives.

        Its errors do not name the host, for callers that do.
        """
        if self.why_lost:
            raise StateError(f"it is lost: {self.why_lost}")
        try:
            return plain_bytes(getattr(self._actor, method.__name__).remote(*arguments), timeout_s)
        except TimeoutError as error:
            raise StateError(f"{method.__name__}() of its agent did not end within {timeout_s:g} s") from error
        except Exception as error:  # Ray says it in many ways, and in others after its shutdown
            raise StateError(f"its agent has ended: {first_line(error)}") from error

    def post(self, posted: Posted, tensors: Sequence[Tensor] = ()) -> None:
        self._outbox.post(posted, tensors)

    def flush(self) -> None:
        self._outbox.flush()

    def _send(self, head: bytes, buffers: list[pickle.PickleBuffer]) -> None:
        if self.why_lost:
            return
        try:
            self._actor.post.remote(head, buffers)
        except BaseException as error:  # the agent would wait for this batch before it takes the next
            self.lose(first_line(error) or type(error).__name__)
            if not isinstance(error, Exception):  # Ctrl-C
                raise

    # ---------------------------------------------------------------------------------------------- workers

    def open(self, openings: Sequence[Opening]) -> list[tuple[RemoteProcess, Opened]]:
        """Return the process of each worker, and what the agent says of it."""
        told = decoded(self.ask(Agent.open, encoded(openings), timeout_s=START_S), list[Opened], "answer")
        with self._lock:
            return [(self._process(opening, opened), opened) for opening, opened in zip(openings, told, strict=True)]

    def _process(self, opening: Opening, opened: Opened) -> RemoteProcess:
        if opened.process not in self._processes:
            self._processes[opened.process] = RemoteProcess(self, opened, opening.python)
        process = self._processes[opened.process]
        if opened.process in self._ended_early:
            process.has_ended()
        process.engines.add(opened.worker)
        return process

    def stack(self, process: int) -> str:
        return self.ask(Agent.stack, process, timeout_s=_STACK_S).decode()

    def kill(self, process: int, because: str) -> None:
        try:
            self._value(self.ask_plain(Agent.kill, process, because, timeout_s=ASK_S))
        except StateError as error:  # who cannot end one worker ends them all
            self.lose(first_line(error))

    def use_store(self, actor: Any) -> None:
        """Have the agent take its workers' questions to this store actor."""
        if self._store is not actor:
            self.ask(Agent.use_store, actor, timeout_s=START_S)
            self._store = actor

    def new_store(self) -> str:
        return self.ask(Agent.new_store).decode()

    def remove_store(self, path: str) -> None:
        with contextlib.suppress(StateError):
            self.ask(Agent.remove_store, path)

    def _receive(self) -> None:
        try:
            while not self.why_lost:
                for said in decoded(self.ask_plain(Agent.receive, timeout_s=None), list[Said], "list of messages"):
                    self._take(said)
        except Exception as error:  # the agent has ended, or sends what is no message
            self.lose(first_line(error))

    def _take(self, said: Said) -> None:
        if said.kind == "line":
            print_line(*decoded(said.body, tuple[str, str, str], "line"))
            return
        with self._lock:
            process = self._processes.get(said.process)
            if process is None and said.kind == "ended":  # before the answer to ``open`` has been read
                self._ended_early.add(said.process)
                return
        if process is None:
            raise InvalidInputError(f"it tells of a process {said.process} that it has not opened")
        if said.kind == "ended":
            process.has_ended()
        else:
            process.calls.settle(said.call, said.kind, said.body, [tensor_of(one) for one in said.tensors])

    def beat(self, timeout_s: float) -> None:
        with self._lock:
            known = [number for number, process in self._processes.items() if process.is_stopped]
        numbers = decoded(self.ask_plain(Agent.beat, sorted(known), timeout_s=timeout_s), list[int], "beat")
        with self._lock:
            for number, process in self._processes.items():
                process.is_stopped = number in numbers

    # ---------------------------------------------------------------------------------------------- end

    def lose(self, why: str) -> None:
        with self._lock:
            if self.why_lost:
                return
            self.why_lost = why
            processes = list(self._processes.values())
        self._end_agent()
        for process in processes:
            process.lose(why)
        self._on_loss(self)

    def _end_agent(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # Ray may have been shut down
            ray.kill(self._actor)
        if self._agent_process is not None:
            # Ray tells the program's standard output of one that ends before Ray has ended it. One that is stopped
            # outlives Ray's own signal.
            ended = select.poll()
            ended.register(self._agent_process, select.POLLIN)
            ended.poll(_END_S * 1000)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._agent_process, signal.SIGKILL)
            os.close(self._agent_process)


def _error_of(failure: WorkerFailure, host: str) -> Exception:
    """Return what an agent raised: rlcore's own errors keep their class, all others become a StateError."""
    from rlcore.engines.launchers.failures import raised

    if not failure.kind:
        return StateError(f"its agent failed: {failure.in_one_line}\n\n{failure.traceback}")
    return raised(failure, WorkerContext("the agent", 0, 1, host, 0), "open")
