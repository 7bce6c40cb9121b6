"""The workers of one executor, called together; they fail together, with one error."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from rlcore.engines.launchers.worker import WorkerHandle
from rlcore.errors import StateError, WorkerDiedError, WorkerTimeoutError

_GRACE_S = 5.0
"""After one worker failed, others may wait for it in a collective: how long they get to end by themselves."""
STOP_S = 5.0
"""How long workers get to end in order before they are killed."""
_sending = threading.Lock()


class WorkerGroup:
    """All workers of an executor, by rank."""

    def __init__(self, workers: Sequence[WorkerHandle], timeout_s: float, store: str = "") -> None:
        self.workers = list(workers)
        self._timeout_s = timeout_s
        self._store = store
        self._broken_by: BaseException | None = None

    def call(
        self,
        method: str,
        calls: Sequence[tuple[Sequence[Any], dict[str, Any]]],
        on_event: Callable[[Any], None] | None = None,
    ) -> list[Any]:
        """Call ``method`` on all workers at once, with one (args, kwargs) each; their results by rank.

        Raises:
            StateError: the workers were ended by an earlier failure.
            WorkerDiedError, WorkerTimeoutError: all workers of the executor are ended then.
            Exception: what the first worker raised; if others cannot end without it, all are ended.
        """
        if self._broken_by is not None:
            raise StateError(
                f"{method}() is refused: the workers were ended after an earlier failure; call restart()"
            ) from self._broken_by
        # Calls of several groups reach all their shared processes in one order: collectives cannot cross.
        with _sending:
            futures = [
                worker.call(method, *args, on_event=on_event, **kwargs)
                for worker, (args, kwargs) in zip(self.workers, calls, strict=True)
            ]
        return self._results(method, futures)

    def wait_until_started(self, started: Sequence[Future[Any]]) -> None:
        """Raises as ``call`` does."""
        self._results("start", list(started))

    def _results(self, method: str, futures: list[Future[Any]]) -> list[Any]:
        wait(futures, self._timeout_s, return_when=FIRST_EXCEPTION)
        if error := self._failure(method, futures):
            raise error
        return [future.result() for future in futures]

    def _failure(self, method: str, futures: list[Future[Any]]) -> BaseException | None:
        if not _errors(futures):
            pending = [rank for rank, future in enumerate(futures) if not future.done()]
            return self._timeout(method, pending) if pending else None
        if not isinstance(_cause(_errors(futures)), WorkerDiedError):
            wait(futures, _GRACE_S)  # a collective tells the living of a death before their parent hears of it
        errors = _errors(futures)
        error = _cause(errors)
        for rank, other in errors.items():
            if other is not error:
                error.add_note(f"rank {rank} failed too: {str(other).partition(chr(10))[0]}")
        if isinstance(error, WorkerDiedError) or not all(future.done() for future in futures):
            error.add_note("the executor's workers were ended; restart() brings them back")
            self._break(error)
        return error

    def _timeout(self, method: str, ranks: list[int]) -> WorkerTimeoutError:
        late = [self.workers[rank] for rank in ranks]
        stacks = [f"{worker.context.where}:\n{worker.stack()}" for worker in late]
        error = WorkerTimeoutError(
            rank=ranks[0],
            device=late[0].context.device_name,
            method=method,
            timeout_s=self._timeout_s,
            stack="\n\n".join(stacks),
        )
        error.add_note("the executor's workers were ended; restart() brings them back")
        self._break(error)
        return error

    def _break(self, error: BaseException) -> None:
        self._broken_by = error
        self.kill(f"{self.workers[0].context.engine} failed: {str(error).partition(chr(10))[0]}")

    def kill(self, because: str) -> None:
        """End all workers at once, and with them the workers of other engines in their processes."""
        for worker in self.workers:
            worker.kill(because)
        for worker in self.workers:
            worker.join(STOP_S)
        self._remove_store()

    def stop(self) -> None:
        """Let the workers close what they hold and end; kill those that do not within ``STOP_S``."""
        try:
            for worker in self.workers:
                worker.ask_to_stop()
            deadline = time.monotonic() + STOP_S
            if not all(worker.join(max(0.0, deadline - time.monotonic())) for worker in self.workers):
                self.kill(f"{self.workers[0].context.engine} did not close within {STOP_S:g} s")
        except BaseException:  # the second Ctrl-C
            self.kill("the user's program was interrupted")
            raise
        self._remove_store()

    def _remove_store(self) -> None:
        if self._store:
            shutil.rmtree(self._store, ignore_errors=True)


def _errors(futures: Sequence[Future[Any]]) -> dict[int, BaseException]:
    """Rank -> what it raised, of those that have ended."""
    ended = {rank: future.exception() for rank, future in enumerate(futures) if future.done()}
    return {rank: error for rank, error in ended.items() if error is not None}


def _cause(errors: dict[int, BaseException]) -> BaseException:
    """Of errors that came together the one to look at: a death, else not one of a collective, else the first."""

    def remoteness(error: BaseException) -> int:
        return 0 if isinstance(error, WorkerDiedError) else 2 if _is_from_collective(error) else 1

    return min(errors.values(), key=remoteness)


def _is_from_collective(error: BaseException) -> bool:
    """It was raised inside torch.distributed, where another rank's failure ends up."""
    files = re.findall(r'File "(.*?)", line', getattr(error, "traceback", ""))
    return bool(files) and "/torch/distributed/" in files[-1]
