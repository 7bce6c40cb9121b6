"""The processes that an engine starts for its replica: finds the one that ended first, and how.

The engine itself then raises the error of its current step ("cancelled", "Executor failed."), or waits for good.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import active_children, connection
from multiprocessing.process import BaseProcess
from typing import Any

from rlcore.engines.launchers.worker import WorkerContext
from rlcore.errors import RlcoreError, WorkerDiedError
from rlcore.process.endings import how_it_ended
from rlcore.process.memory_kills import MemoryKills

_LOOK_AGAIN_S = 0.2
_NEWS_S = 2.0
"""How long to wait for the news of a process's end: another process may report the lost connection earlier."""
_REAPED_S = 10.0
_KILLED_S = 3.0


class WorkerProcesses:
    """Watches the multiprocessing children of this process, from their start.

    Args:
        context: the replica's.
        count: how many processes the engine starts; with 0 nothing is watched.
        name: says which of them one is, such as "vLLM's VllmWorker-1 (process 12, cpu:1)".
        reports_errors: one that ends with exit code 0 has told the engine why.
        clean_up: called when one has ended, and then all, before anybody is told.
    """

    def __init__(
        self,
        context: WorkerContext,
        count: int,
        name: Callable[[BaseProcess], str],
        *,
        reports_errors: bool,
        clean_up: Callable[[], None] = lambda: None,
    ) -> None:
        self.context = context
        self._count = count
        self._name = name
        self._reports_errors = reports_errors
        self._clean_up = clean_up
        self._lost = ""
        self.is_over = False
        """They are ended because the engine is closed."""
        self._processes: list[BaseProcess] = []
        self._kills = MemoryKills()
        self._watching = threading.Thread(target=self._watch, name="rlcore-watch", daemon=True)
        if count:
            self._watching.start()

    @contextlib.contextmanager
    def needed_for(self, method: str) -> Iterator[None]:
        """Inside, an error of the engine becomes a WorkerDiedError if one of its processes has ended.

        Raises:
            WorkerDiedError: a process has ended, now or before.
        """
        try:
            yield
        except RlcoreError:
            raise
        except Exception as error:
            if self._count:
                self._watching.join(_NEWS_S)
            self.require(method, error)
            raise

    @property
    def is_lost(self) -> bool:
        """One of the processes has ended."""
        return bool(self._lost)

    def require(self, method: str, cause: Exception | None = None) -> None:
        """Raise WorkerDiedError if one of the processes has ended."""
        if self._lost:
            rank, device = self.context.rank, self.context.device_name
            raise WorkerDiedError(rank=rank, device=device, method=method, how=f"lost {self._lost},") from cause

    def end(self) -> None:
        """End all processes; none of them is missed from now on."""
        self.is_over = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(_REAPED_S)
        if self._count:
            self._watching.join(_REAPED_S)  # what it names them by is about to go

    def _watch(self) -> None:
        processes = self._processes
        ended: list[Any] = []
        while not ended:
            if self.is_over:  # before any was started
                return
            found = [process for process in active_children() if process not in processes]
            processes += found  # kept, as Python soon forgets a process that has ended
            patience_s = None if len(processes) >= self._count else _LOOK_AGAIN_S
            ended = connection.wait([process.sentinel for process in processes], patience_s)
        first = next(process for process in processes if process.sentinel == ended[0])
        code = _exit_code(first)
        if self.is_over or (self._reports_errors and code == 0):
            return
        how = "has ended" if code is None else how_it_ended(code, self._kills.explanation())
        lost = f"{self._name(first)}, which {how}"
        for process in processes:  # the engine would wait for them, and they for the lost process
            process.kill()
        deadline = time.monotonic() + _KILLED_S
        for process in processes:
            connection.wait([process.sentinel], max(0.0, deadline - time.monotonic()))
        self._clean_up()
        self._lost = lost  # from now on callers are told, and this process may be ended


def _exit_code(process: BaseProcess) -> int | None:
    """Return the exit code of an ended process. If the engine waits for it too, Python knows it a moment later."""
    deadline = time.monotonic() + _REAPED_S
    while process.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return process.exitcode
