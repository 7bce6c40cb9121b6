"""Runs a worker in the user's own process: no copies, and breakpoints work."""

from __future__ import annotations

import math
import os
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from operator import attrgetter
from typing import Any

from rlcore.engines.launchers.base import Launcher, LaunchOptions, WorkerPlacement, engine_numbers
from rlcore.engines.launchers.failures import describe, raised
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.want_of_memory import want_of_memory
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.errors import InvalidInputError, RlcoreError
from rlcore.process.status import process_name
from rlcore.settings import Settings

_running = threading.RLock()
"""Held while a worker of this process runs a call: threads of the user's program take turns."""
os.register_at_fork(after_in_child=_running._at_fork_reinit)  # type: ignore[attr-defined]  # another thread may hold it


class InlineLauncher(Launcher):
    """Starts the one worker of an executor in the user's process."""

    def start(
        self, worker_class: type[Any], placements: Sequence[WorkerPlacement], options: LaunchOptions
    ) -> WorkerGroup:
        if len(placements) > 1:
            cause = " (RLCORE_DEBUG=pdb forces it)" if Settings.from_env().debug == "pdb" else ""
            raise InvalidInputError(
                f"launcher 'inline'{cause} runs one worker, and {options.engine} has {len(placements)}; "
                "use 'process', or one worker"
            )
        (placement,) = placements
        context = WorkerContext(options.engine, 0, 1, placement.devices[0], next(engine_numbers))
        return start_inline(worker_class, context, options.timeout_s)


def start_inline(worker_class: type[Any], context: WorkerContext, timeout_s: float) -> WorkerGroup:
    """Start a worker here, and return it as a group of one."""
    group = WorkerGroup(context.engine, timeout_s, order=_running)
    group.workers.append(InlineWorker(worker_class, context))
    return group


class InlineWorker:
    """A worker in the user's process; a call has ended when it returns."""

    def __init__(self, worker_class: Any, context: WorkerContext) -> None:
        self._on_event: Callable[[Any], None] | None = None
        self.context = replace(context, emit=self._emit)
        self.worker: Any = self._run("start", lambda: worker_class(self.context)).result()

    def call(self, method: str, *args: object, **kwargs: object) -> Future[Any]:
        """Run the call now; the future is done."""
        return self.prepare(method, args, kwargs, timeout_s=math.inf)()

    def prepare(
        self,
        method: str,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        *,
        on_event: Callable[[Any], None] | None = None,
        timeout_s: float,
    ) -> Callable[[], Future[Any]]:
        """See ``WorkerHandle``. Nothing ends a call after ``timeout_s``: it runs in the caller's own thread."""
        there = [arg.worker if isinstance(arg, InlineWorker) else arg for arg in args]

        def call() -> Future[Any]:
            outer, self._on_event = self._on_event, on_event
            try:
                return self._run(method, lambda: attrgetter(method)(self.worker)(*there, **kwargs))
            finally:
                self._on_event = outer

        return call

    def cancel(self, answer: Future[Any]) -> None:
        """Do nothing: what interrupts the caller of an inline call interrupts the call."""

    @property
    def current(self) -> None:
        """Return None: a call has ended when it returns."""

    def _run(self, method: str, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            with self.context.running(method):
                future.set_result(function())
        except RlcoreError as error:
            if memory := want_of_memory(error, self.context.device):
                error.is_out_of_memory = True
                error.add_note(memory)
                _free_frames(error)
            error.add_note(f"raised by {method}() on {self.context.where}")
            future.set_exception(error)
        # sys.exit() in a worker does not end the user's program; Ctrl-C does.
        except (Exception, SystemExit) as error:
            failed = raised(describe(error, self.context.device), self.context, method)
            failed.__cause__ = error
            if isinstance(failed, RlcoreError) and failed.is_out_of_memory:
                _free_frames(error)
            future.set_exception(failed)
        return future

    @property
    def process_id(self) -> int:
        return os.getpid()

    @property
    def process(self) -> str:
        return process_name(os.getpid())

    @property
    def is_stopped(self) -> bool:
        return False

    def ask_to_stop(self) -> None:
        """End it."""
        try:
            self.call("close").result()
        finally:
            self.context.world.destroy()

    def join(self, timeout_s: float) -> bool:
        """Return True: it has ended when ``ask_to_stop`` returns."""
        return True

    def kill(self, because: str) -> None:
        """Drop the worker; what it holds is freed with the last reference to it."""
        self.worker = None

    def stack(self) -> str:
        return "in the user's process"

    def _emit(self, event: object) -> None:
        if self._on_event is not None:
            self._on_event(event)


def _free_frames(error: BaseException | None) -> None:
    """Drop the variables of the frames behind an error, which would keep the memory that the next attempt needs.

    A debugger that steps into the error still sees them, under RLCORE_DEBUG=pdb.
    """
    if Settings.from_env().debug == "pdb":
        return
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
