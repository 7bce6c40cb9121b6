"""The workers of one executor, called together; they fail together, with one error."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from rlcore import spans
from rlcore.engines.launchers.pickled_calls import one_call
from rlcore.engines.launchers.states import state_of_worker
from rlcore.engines.launchers.worker import CurrentCall, WorkerHandle
from rlcore.errors import StateError, WorkerDiedError, WorkerTimeoutError, first_line

_GRACE_S = 5.0
"""After one worker failed, others may wait for it in a collective: how long they get to end by themselves."""
STOP_S = 5.0
"""How long workers get to end in order before they are killed."""
_MOST_NOTES = 7
"""The number of other ranks whose errors are shown; nobody reads those of hundreds."""
_LOOK_S = 0.5
"""How long a call waits at a time. A Ctrl-C that another thread takes, or that comes just before the wait, is seen only
after it; and so are workers that are stopped."""
sending = threading.RLock()
"""Held while all workers of a group are sent one call: processes that several groups share get the calls in one order,
so that their collectives cannot cross."""
os.register_at_fork(after_in_child=sending._at_fork_reinit)  # type: ignore[attr-defined]  # another thread may hold it


_Inbox = queue.SimpleQueue["Future[Any] | Callable[[], None]"]
"""The answers that come back during a call, in order: futures that have ended, and a function for each event."""


class RendezvousStore(Protocol):
    """The store through which workers find each other, until it is removed or dropped."""

    path: str

    @property
    def remove(self) -> Callable[[], object]: ...


class WorkerGroup:
    """All workers of an executor, by rank. They end when nothing refers to the group any more."""

    def __init__(
        self, engine: str, timeout_s: float, store: str = "", *, order: AbstractContextManager[Any] = sending
    ) -> None:
        """
        Args:
            order: held while the workers are sent a call. A worker in this process has another than ``sending``: its
                call runs meanwhile, and may wait for workers of other groups.
        """
        self.engine = engine
        self.workers: list[Any] = []
        self._timeout_s = timeout_s
        self.store = store
        self._owner = os.getpid()
        self._order = order
        self._broken_by: BaseException | None = None
        self._kept: list[object] = []
        self.new_rendezvous: Callable[[], RendezvousStore] | None = None
        """Makes a store for these workers and others, on whatever host; None: they share folders."""
        self.flush: Callable[[], None] = lambda: None
        """Sends the calls that were made of all workers, where one message carries those of several."""
        self._abandoned = weakref.finalize(self, _abandon, self.workers, store, self._owner)

    def call(
        self,
        method: str,
        calls: Sequence[tuple[Sequence[object], dict[str, Any]]],
        on_event: Callable[[Any], None] | None = None,
        timeout_s: float | None = None,
        *,
        ends_stopped: bool = False,
        is_enough: Callable[[Any], bool] | None = None,
    ) -> list[Any]:
        """Call ``method`` on all workers at once, with one (args, kwargs) each; return their results by rank.

        ``on_event`` gets what they emit meanwhile, in the thread of this call. A call may take ``timeout_s`` (None: the
        group's) from when its worker begins with it: it may have to wait for another engine's call in the same process.
        With ``ends_stopped`` it does not wait for a worker that is stopped for ``STOP_S``: for calls before the end,
        where whoever stopped the worker has no use for it any more. After an answer that ``is_enough`` the other
        workers are told to end early, as far as the method looks at ``WorkerContext.is_cancelled``.

        Raises:
            StateError: the workers were ended by an earlier failure, or belong to another process.
            InvalidInputError: an argument cannot be sent; nothing is called then.
            WorkerDiedError, WorkerTimeoutError: all workers of the executor are ended then.
            Exception: what the first worker raised; if others cannot end without it, all are ended.
        """
        if spans.recorder is None:
            return self._call(method, calls, on_event, timeout_s, ends_stopped=ends_stopped, is_enough=is_enough)
        from rlcore.engines.launchers.traced_calls import results_of

        with spans.call_span(method, engine=self.engine, number=self.workers[0].context.number) as here:
            results = self._call(method, calls, on_event, timeout_s, ends_stopped=ends_stopped, is_enough=is_enough)
            here.add(results_of(calls, results))
        return results

    def _call(
        self,
        method: str,
        calls: Sequence[tuple[Sequence[object], dict[str, Any]]],
        on_event: Callable[[Any], None] | None,
        timeout_s: float | None,
        *,
        ends_stopped: bool,
        is_enough: Callable[[Any], bool] | None,
    ) -> list[Any]:
        self.check_usable(f"{method}()")
        inbox: _Inbox = queue.SimpleQueue()
        caller = threading.get_ident()

        def take(event: object) -> None:
            assert on_event is not None
            if threading.get_ident() == caller:  # the worker runs in this very thread
                on_event(event)
            else:
                inbox.put(partial(on_event, event))

        with one_call():
            prepared = [
                worker.prepare(method, args, kwargs, on_event=on_event and take, timeout_s=timeout_s or self._timeout_s)
                for worker, (args, kwargs) in zip(self.workers, calls, strict=True)
            ]
        futures = self._send(prepared)
        try:
            return self._results(method, futures, inbox, ends_stopped=ends_stopped, is_enough=is_enough)
        except BaseException:  # Ctrl-C, or what on_event raised: the workers would go on for nobody
            self._cancel(futures)
            raise

    def _cancel(self, futures: Sequence[Future[Any]]) -> None:
        for worker, future in zip(self.workers, futures, strict=True):
            worker.cancel(future)

    def check_usable(self, purpose: str) -> None:
        """Refuse ``purpose`` where no call would reach the workers.

        Raises:
            StateError: as ``call``.
        """
        if self._owner != os.getpid():
            raise StateError(
                f"{purpose} is refused: the workers of {self.engine} belong to process {self._owner}, of which this "
                "one is a fork; build an engine here"
            )
        if self._broken_by is not None:
            raise StateError(
                f"{purpose} is refused: the workers were ended after an earlier failure "
                f"({first_line(self._broken_by)}); call restart()"
            ) from self._broken_by

    def _send(self, prepared: Sequence[Callable[[], Future[Any]]]) -> list[Future[Any]]:
        futures: list[Future[Any]] = []
        try:
            with self._order:
                for call in prepared:
                    futures.append(call())
                self.flush()
        except BaseException as error:  # Ctrl-C, most likely
            if futures:  # some ranks have the call and some have not: they would never meet again
                self._break(error)
            raise
        return futures

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Take the handles that are added to ``workers`` meanwhile, and wait in the end until all of them are ready.

        Each handle has a future ``started``. After an error, or Ctrl-C, all that were added are ended. Raises as
        ``call`` does.
        """
        try:
            with self._order:
                yield
                self.flush()
            self._results("start", [worker.started for worker in self.workers], queue.SimpleQueue())
        except BaseException:  # Ctrl-C too: no worker is left
            self.stop()
            raise

    def _results(
        self,
        method: str,
        futures: list[Future[Any]],
        inbox: _Inbox,
        *,
        ends_stopped: bool = False,
        is_enough: Callable[[Any], bool] | None = None,
    ) -> list[Any]:
        for future in futures:
            future.add_done_callback(inbox.put)
        unanswered = set(futures)
        running_until = time.monotonic()
        while unanswered:
            item = self._next(inbox, futures)
            if item is None:
                present = self._present(futures)
                if any(current.remaining_s <= 0 for current in present.values()):
                    raise self._timeout(method, present, futures)
                if not ends_stopped or not any(self.workers[rank].is_stopped for rank in present):
                    running_until = time.monotonic()
                elif time.monotonic() - running_until > STOP_S:
                    raise self._timeout(method, present, futures, STOP_S)
            elif not isinstance(item, Future):
                item()
            elif item.exception() is None:
                unanswered.discard(item)
                if is_enough is not None and unanswered and is_enough(item.result()):
                    is_enough = None
                    self._cancel(futures)
            else:
                raise self._failure(futures)
        return [future.result() for future in futures]

    def _next(self, inbox: _Inbox, futures: list[Future[Any]]) -> Future[Any] | Callable[[], None] | None:
        """Return the next answer or event; None if none came for ``_LOOK_S``, or while the present calls had time."""
        with contextlib.suppress(queue.Empty):  # answers that are here need no look at hundreds of workers
            return inbox.get_nowait()
        # Without a present call its answer is being read, and will wake this up.
        patience_s = min((current.remaining_s for current in self._present(futures).values()), default=_LOOK_S)
        with contextlib.suppress(queue.Empty):
            return inbox.get(timeout=min(_LOOK_S, max(0.0, patience_s)))
        return None

    def _present(self, futures: list[Future[Any]]) -> dict[int, CurrentCall]:
        """Return the current call of each rank that has not answered."""
        found = {rank: self.workers[rank].current for rank, future in enumerate(futures) if not future.done()}
        return {rank: current for rank, current in found.items() if current is not None}

    def _failure(self, futures: list[Future[Any]]) -> BaseException:
        errors = _errors(futures)
        if not isinstance(_cause(errors), WorkerDiedError):
            self._cancel(futures)
            wait(futures, _GRACE_S)  # ranks may hear of a death in a collective before the parent hears of it
        errors |= _errors(futures)  # of two that are alike, the first that came is the cause
        error = _cause(errors)
        others = {rank: other for rank, other in errors.items() if other is not error}
        for rank, other in list(others.items())[:_MOST_NOTES]:
            error.add_note(f"rank {rank} failed too: {first_line(other)}")
        if len(others) > _MOST_NOTES:
            error.add_note(f"and {len(others) - _MOST_NOTES} other ranks failed too")
        if isinstance(error, WorkerDiedError) or not all(future.done() for future in futures):
            error.add_note("the executor's workers were ended; restart() brings them back")
            self._break(error)
        return error

    def _timeout(
        self,
        method: str,
        present: dict[int, CurrentCall],
        futures: list[Future[Any]],
        waited_s: float | None = None,
    ) -> WorkerTimeoutError:
        """Return an error that blames the worker for which the others wait, and shows all that have not answered.

        ``waited_s`` is the time that it got, None the one that its call has.
        """
        with ThreadPoolExecutor(len(present)) as threads:  # a stack may take a second
            stacks = dict(zip(present, threads.map(lambda rank: self.workers[rank].stack(), present), strict=True))
        states = {rank: state_of_worker(stack) for rank, stack in stacks.items()}
        rank = min(states, key=lambda rank: (states[rank][0], rank))
        current, where = present[rank], {rank: self.workers[rank].context.where for rank in present}
        error = WorkerTimeoutError(
            rank=rank,
            device=self.workers[rank].context.device_name,
            method=current.method,
            timeout_s=waited_s or current.timeout_s,
            state=states[rank][1],
            stack="\n\n".join(f"{where[one]}:\n{stacks[one]}" for one in sorted(stacks, key=lambda one: one != rank)),
        )
        if len(states) > 1:
            for other, (_, words) in states.items():
                error.add_note(f"{where[other]} {words}")
        if current.answer not in futures:
            which = "an earlier call" if current.engine == self.engine else "a call"
            error.add_note(f"it is {which} of {current.engine}; {method}() of {self.engine} waited behind it")
        error.add_note("the executor's workers were ended; restart() brings them back")
        self._break(error)
        return error

    def _break(self, error: BaseException) -> None:
        self._broken_by = error
        self.kill(f"{self.engine} failed: {first_line(error)}")

    def keep_until_end(self, thing: object) -> None:
        """Keep something that the workers use until they have ended."""
        if self._abandoned.alive:
            self._kept.append(thing)

    def kill(self, because: str) -> None:
        """End all workers at once, and with them the workers of other engines in their processes."""
        if self._owner != os.getpid():
            return
        for worker in self.workers:
            worker.kill(because)
        deadline = time.monotonic() + STOP_S
        for worker in self.workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        self._remove_store()

    def stop(self) -> None:
        """Let the workers close what they hold and end; kill those that do not within ``STOP_S``."""
        if self._owner != os.getpid():
            return
        try:
            with self._order:
                for worker in self.workers:
                    worker.ask_to_stop()
            deadline = time.monotonic() + STOP_S
            if not all(worker.join(max(0.0, deadline - time.monotonic())) for worker in self.workers):
                self.kill(f"{self.engine} did not close within {STOP_S:g} s")
        except BaseException:  # the second Ctrl-C
            self.kill("the user's program was interrupted")
            raise
        self._remove_store()

    def _remove_store(self) -> None:
        self._abandoned.detach()
        self._kept.clear()
        if self.store:
            shutil.rmtree(self.store, ignore_errors=True)


def _abandon(workers: Sequence[WorkerHandle], store: str, owner: int) -> None:
    """Stop the workers of a group that was dropped without ``stop``, or at the end of the program."""
    if os.getpid() != owner:
        return
    for worker in workers:
        worker.ask_to_stop()
    if store:
        shutil.rmtree(store, ignore_errors=True)


def _errors(futures: Sequence[Future[Any]]) -> dict[int, BaseException]:
    """Return the error of each rank that has failed."""
    ended = {rank: future.exception() for rank, future in enumerate(futures) if future.done()}
    return {rank: error for rank, error in ended.items() if error is not None}


def _cause(errors: dict[int, BaseException]) -> BaseException:
    """Choose the error to report: a death, else one that is not from a collective, else the first that came."""

    def distance(error: BaseException) -> int:
        return 0 if isinstance(error, WorkerDiedError) else 2 if _is_from_collective(error) else 1

    return min(errors.values(), key=distance)


def _is_from_collective(error: BaseException) -> bool:
    """Return True if it was raised inside torch.distributed, which mostly echoes another rank's failure."""
    files = re.findall(r'File "(.*?)", line', getattr(error, "traceback", ""))
    return bool(files) and "/torch/distributed/" in files[-1]
