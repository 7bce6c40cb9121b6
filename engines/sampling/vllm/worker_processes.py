"""The processes that vLLM starts for a replica of several devices: finds the one that ended first, and how.

vLLM itself then raises the error of its current step ("cancelled", "Executor failed.").
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
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


class WorkerProcesses:
    """Watches the multiprocessing children of this process, from their start.

    Args:
        context: the replica's. On one device, and under torchrun, vLLM starts no process.
    """

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self._lost = ""
        self._kills = MemoryKills()
        self._watching = threading.Thread(target=self._watch, name="rlcore-vllm-watch", daemon=True)
        self._are_any = len(context.devices) > 1
        if self._are_any:
            self._watching.start()

    @contextlib.contextmanager
    def needed_for(self, method: str) -> Iterator[None]:
        """Inside, an error of vLLM becomes a WorkerDiedError if one of its processes has ended.

        Raises:
            WorkerDiedError: a process has ended, now or before.
        """
        try:
            yield
        except RlcoreError:
            raise
        except Exception as error:
            if self._are_any:
                self._watching.join(_NEWS_S)
            if self._lost:
                rank, device = self.context.rank, self.context.device_name
                raise WorkerDiedError(rank=rank, device=device, method=method, how=f"lost {self._lost},") from error
            raise

    def _watch(self) -> None:
        processes: list[BaseProcess] = []
        ended: list[Any] = []
        while not ended:
            found = [process for process in active_children() if process not in processes]
            processes += found  # kept, as Python soon forgets a process that has ended
            patience_s = None if len(processes) == len(self.context.devices) else _LOOK_AGAIN_S
            ended = connection.wait([process.sentinel for process in processes], patience_s)
        first = next(process for process in processes if process.sentinel == ended[0])
        if (code := _exit_code(first)) == 0:  # it has told vLLM why it ends
            return
        how = "has ended" if code is None else how_it_ended(code, self._kills.explanation())
        self._lost = f"{self._name(first)}, which {how}"
        for process in processes:  # vLLM would wait for them, and they for the lost process
            process.kill()

    def _name(self, process: BaseProcess) -> str:
        """Return the process's name with its rank and device; vLLM's names end in the rank."""
        where = [f"process {process.pid}"]
        if found := re.fullmatch(r"VllmWorker-(\d+)", process.name):
            rank = int(found[1])
            where += [f"tensor-parallel rank {rank}", self.context.devices[rank]]
        return f"vLLM's {process.name} ({', '.join(where)})"


def _exit_code(process: BaseProcess) -> int | None:
    """Return the exit code of an ended process. If vLLM waits for it too, Python knows the code a moment later."""
    deadline = time.monotonic() + _REAPED_S
    while process.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return process.exitcode
