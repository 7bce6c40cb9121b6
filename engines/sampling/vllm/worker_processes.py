"""The processes that vLLM starts for a replica of several devices. On one device, and under torchrun, it starts none.

vLLM itself then raises the error of its current step ("cancelled", "Executor failed.").
"""

from __future__ import annotations

import re
from multiprocessing.process import BaseProcess

from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.sampling.replica.worker_processes import WorkerProcesses


def vllm_processes(context: WorkerContext) -> WorkerProcesses:
    """Watch the processes of the vLLM engine that drives the context's devices, from before it is made."""

    def name(process: BaseProcess) -> str:
        """Return the process's name with its rank and device; vLLM's names end in the rank."""
        where = [f"process {process.pid}"]
        if found := re.fullmatch(r"VllmWorker-(\d+)", process.name):
            rank = int(found[1])
            where += [f"tensor-parallel rank {rank}", context.devices[rank]]
        return f"vLLM's {process.name} ({', '.join(where)})"

    count = len(context.devices) if len(context.devices) > 1 else 0
    return WorkerProcesses(context, count, name, reports_errors=True)
