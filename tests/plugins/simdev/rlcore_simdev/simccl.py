"""Simulated collective library: gloo over the host's view of device memory, as a torch.distributed back end."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlcore_simdev.faults import has_fault

_SAME_NAME = (
    *("allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced", "broadcast", "reduce", "reduce_scatter"),
    *("alltoall", "gather", "scatter", "send", "recv", "recv_anysource"),
    *("_allgather_base", "_reduce_scatter_base", "alltoall_base"),
)
_RENAMED = {  # by torch 2.13, for process groups but not for their back ends
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
OPERATIONS = dict(zip(_SAME_NAME, _SAME_NAME, strict=True)) | _RENAMED
"""Of a process group -> what gloo calls it."""


class SimCcl(dist.ProcessGroup):
    """Its operations wait on the host for the current stream, then run on gloo's threads in device memory itself."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._gloo = dist.ProcessGroupGloo(store, rank, size, options)
        self._name = self._desc = ""

    def barrier(self, opts: Any = None) -> Any:
        if has_fault("barrier_does_nothing"):
            return _Done()
        torch.accelerator.synchronize()
        return self._gloo.barrier(opts or dist.BarrierOptions())

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo  # torch asks it what more it can do

    def getBackendName(self) -> str:  # noqa: N802 - torch's names
        return "simccl"

    def getRank(self) -> int:  # noqa: N802
        return self._gloo.rank()

    def getSize(self) -> int:  # noqa: N802
        return self._gloo.size()

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def abort(self) -> None:
        self._gloo.abort()

    def shutdown(self) -> None:
        if has_fault("groups_leak"):
            os.dup(0)
        self._gloo.shutdown()


class _Done(dist.Work):
    """What has begun is done."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


def _forwarded(name: str) -> Any:
    def operation(self: SimCcl, *arguments: Any) -> Any:
        if name == "allreduce" and has_fault("all_reduce_always_sums"):
            arguments = (arguments[0], dist.AllreduceOptions())
        if "reduce_scatter" in name and has_fault("reduce_scatter_always_sums"):
            arguments = (*arguments[:2], dist.ReduceScatterOptions())
        return getattr(self._gloo, name)(*map(_on_host, arguments))

    return operation


for _operation, _name in OPERATIONS.items():
    setattr(SimCcl, _operation, _forwarded(_name))


def _on_host(value: Any) -> Any:
    if isinstance(value, list):
        return [_on_host(item) for item in value]
    if isinstance(value, torch.Tensor) and value.device.type == "simdev":
        if not has_fault("collectives_do_not_wait"):
            torch.accelerator.current_stream(value.device).synchronize()
        return torch.ops.simdev.host_view(value)
    return value


def register() -> None:
    dist.Backend.register_backend("simccl", SimCcl, devices=["simdev"])
