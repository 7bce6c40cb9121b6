"""A process of workers on the host of an agent, as ``WorkerProcess`` is one of this host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rlcore.engines.launchers.messages import Kind
from rlcore.engines.launchers.pending_calls import PendingCall, PendingCalls
from rlcore.engines.launchers.pickled_calls import dump_pickled_call
from rlcore.engines.launchers.plain_calls import dump_plain_call
from rlcore.engines.launchers.ray.agent_link import AgentLink
from rlcore.engines.launchers.ray.wire import Opened, Posted, contiguous
from rlcore.engines.launchers.states import GONE
from rlcore.engines.launchers.worker import CurrentCall, WorkerContext
from rlcore.errors import StateError, WorkerDiedError, first_line


class RemoteProcess:
    """The process, and the calls that it has not answered yet.

    Attributes:
        engines: numbers of its workers that are not asked to close.
    """

    def __init__(self, link: AgentLink, opened: Opened, python: str) -> None:
        self.pid = opened.pid
        self.name = opened.name
        self.is_stopped = False
        self.calls = PendingCalls()
        self.engines: set[int] = set()
        self._link = link
        self._number = opened.process
        self._dump_call = dump_plain_call if python else dump_pickled_call
        self._ended = threading.Event()

    def start(self, number: int, worker_class: Any, context: WorkerContext, timeout_s: float) -> Future[Any]:
        """Start, with ``flush``, the worker that the agent gave this number; return a future of when it is ready."""
        return self.prepare("start", number, ((worker_class, context), {}), PendingCall(context, "start", timeout_s))()

    def prepare(
        self, kind: Kind, worker: int, arguments: tuple[Any, Any], pending: PendingCall
    ) -> Callable[[], Future[Any]]:
        """Encode a call; return a function that makes it, with ``flush``. Its tensors must not change until then."""
        body, tensors = self._dump_call((pending.method, *arguments))
        beside = contiguous(tensors)
        return lambda: self._send(kind, worker, body, beside, pending)

    def _send(self, kind: Any, worker: int, body: bytes, tensors: list[Any], pending: PendingCall) -> Future[Any]:
        call = self.calls.add(pending)
        if call is None:
            pending.future.set_exception(self._death(pending, has_begun=False))
        else:
            self._link.post(Posted(kind, self._number, worker, call, pending.method, body), tensors)
        return pending.future

    def flush(self) -> None:
        self._link.flush()

    @property
    def current(self) -> CurrentCall | None:
        return self.calls.current

    def cancel(self, answer: Future[Any]) -> None:
        for call in self.calls.numbers_of(answer):
            self._link.post(Posted("cancel", self._number, call=call))
        self.flush()

    # ---------------------------------------------------------------------------------------------- end

    def stack(self) -> str:
        if self._ended.is_set():
            return GONE
        try:
            return self._link.stack(self._number)
        except StateError as error:
            return f"the process cannot be looked at: {first_line(error)}"

    def forget(self, worker: int) -> None:
        self.engines.discard(worker)
        self._link.post(Posted("forget", self._number, worker))
        self.flush()

    def kill(self, because: str) -> None:
        self.engines.clear()
        if not self._ended.is_set():
            self._link.kill(self._number, because)

    def join(self, timeout_s: float) -> bool:
        """Wait for its end if it is to end; return False if it still runs then."""
        return True if self.engines else self._ended.wait(timeout_s)

    def has_ended(self) -> None:
        """Take note of its end. The agent has answered all of its calls before."""
        self._ended.set()

    def lose(self, why: str) -> None:
        """Fail all of its calls: its host is lost."""
        self._ended.set()
        for pending in self.calls.end():
            pending.future.set_exception(self._death(pending))

    def _death(self, pending: PendingCall, *, has_begun: bool = True) -> WorkerDiedError:
        return WorkerDiedError(
            rank=pending.context.rank,
            device=pending.context.device_name,
            method=pending.method,
            how=f"was lost with its host {self._link.host} ({self._link.why_lost})",
            has_begun=has_begun,
        )
