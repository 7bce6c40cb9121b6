"""Runs workers in processes of their own, those of one device in one child of the user's process."""

from __future__ import annotations

import functools
import logging
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rlcore.engines.launchers.device_process import Pending, joining, process_for
from rlcore.engines.launchers.wire import Kind, WorkerReference
from rlcore.engines.launchers.worker import Current, WorkerContext
from rlcore.errors import InvalidInputError, WorkerDiedError

_log = logging.getLogger(__name__)


class ProcessWorker:
    """A worker in a child process."""

    def __init__(
        self,
        worker_class: Any,
        context: WorkerContext,
        environment: dict[str, str],
        timeout_s: float,
        *,
        owns_process: bool = False,
        python: str = "",
    ) -> None:
        self.context = context
        self._worker_class = worker_class
        self._timeout_s = timeout_s
        self._closed: Future[Any] | None = None
        with joining:
            owner = f"worker {context.rank} of engine {context.number}" if owns_process else ""
            self._process = process_for(context.device_name, environment, owner, python)
            self._number, self.started = self._process.start(worker_class, context, timeout_s)

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def current(self) -> Current | None:
        return self._process.current

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """The future raises WorkerDiedError when the process ends first."""
        return self.prepare(method, args, kwargs, timeout_s=self._timeout_s)()

    def prepare(
        self,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        on_event: Callable[[Any], None] | None = None,
        timeout_s: float,
        kind: Kind = "call",
    ) -> Callable[[], Future[Any]]:
        sent = [WorkerReference(arg._number) if isinstance(arg, ProcessWorker) else arg for arg in args]
        pending = Pending(self.context, method, timeout_s, _returned(self._worker_class, method), on_event)
        return self._process.prepare(kind, self._number, (sent, dict(kwargs)), pending)

    def give_up(self, answer: Future[Any]) -> None:
        self._process.give_up(answer)

    def stack(self) -> str:
        return self._process.stack()

    def ask_to_stop(self) -> None:
        if self.started.done() and self.started.exception():
            self._closed = self.started
        else:
            self._closed = self.prepare("close", (), {}, timeout_s=self._timeout_s, kind="close")()
        self._process.forget(self._number)

    def kill(self, because: str) -> None:
        self._process.kill(because)

    def join(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        if self._closed is not None:
            try:
                error = self._closed.exception(timeout_s)
            except TimeoutError:
                return False
            if error is not None and self._closed is not self.started and not isinstance(error, WorkerDiedError):
                _log.warning("close() failed on %s: %s", self.context.where, error)
        return self._process.join(max(0.0, deadline - time.monotonic()))


@functools.cache
def _returned(worker_class: Any, method: str) -> Any:
    """The annotated type of what a worker method returns: the contract by which its answer is decoded."""
    if "." in method:  # of the user's module
        return Any
    try:
        return typing.get_type_hints(getattr(worker_class, method)).get("return", Any)
    except NameError as error:
        raise InvalidInputError(
            f"the annotations of {worker_class.__name__}.{method}() cannot be read: {error}; import the name where "
            "the class is defined, not only under TYPE_CHECKING"
        ) from error
