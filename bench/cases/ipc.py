"""The cost of using another process's memory: to get at it, to use it again, to copy from it.

The other process is a worker on the same device. Without one handle opened before ("warm") a first one pays for the
connection, and on a GPU for the mapping.
"""

from __future__ import annotations

import functools
import statistics
from typing import Any, NamedTuple

import torch

from rlcore.bench.case import Case, Quantity, Work, expect
from rlcore.bench.cases.timing import Measured, self_timed, timed
from rlcore.bench.cases.workers import TIMEOUT_S, BenchWorker, ask, worker_processes
from rlcore.device import Device
from rlcore.types import IpcHandle

_NUM_RUNS = 5
_NUM_HANDLES = 200
_TENSOR_BYTES = 1 << 20
_NUM_COPIES = 10


class _ImportTimes(NamedTuple):
    seconds: list[float]
    """To import each handle."""
    again_s: list[float]
    """To import a handle that is open."""
    use_s: list[float]
    """To have the tensor of a mapping."""
    sums: list[float]


class _ImportWorker(BenchWorker):
    """Imports what it is given."""

    def open(self, handles: list[bytes]) -> _ImportTimes:
        opened = [timed(functools.partial(self._import, data)) for data in handles]
        again_s, use_s, sums = [], [], []
        for mapping, _ in opened:
            again, seconds = timed(functools.partial(self.device.memory.import_ipc, mapping.handle))
            again.close()
            again_s.append(seconds)
            use_s.append(timed(functools.partial(getattr, mapping, "tensor"))[1])
        for mapping, _ in opened:
            sums.append(mapping.tensor.sum(dtype=torch.float64).item())
            mapping.close()
        return _ImportTimes([seconds for _, seconds in opened], again_s, use_s, sums)

    def _import(self, data: bytes) -> Any:
        return self.device.memory.import_ipc(IpcHandle.from_bytes(data))


class _ExportWorker(BenchWorker):
    """Gives one large tensor."""

    def give(self, nbytes: int) -> bytes:
        self._tensor = torch.arange(nbytes // 4, dtype=torch.float32, device=self.device.torch_device)
        self.device.synchronize()
        self._handle = self.device.memory.export_ipc(self._tensor)
        return bytes(self._handle.to_bytes())


def _open(device: Device) -> Measured:
    numel = _TENSOR_BYTES // 4
    tensors = [torch.full((numel,), float(number), device=device.torch_device) for number in range(_NUM_HANDLES)]
    device.synchronize()
    with worker_processes(_ImportWorker, [device.name]) as group:
        ask(group, "open", [device.memory.export_ipc(tensors[0]).to_bytes()])
        exported = [timed(functools.partial(device.memory.export_ipc, tensor)) for tensor in tensors]
        opened = ask(group, "open", [handle.to_bytes() for handle, _ in exported])
        for handle, _ in exported:
            device.memory.revoke(handle, timeout_s=TIMEOUT_S)
    both = [export_s + import_s for (_, export_s), import_s in zip(exported, opened.seconds, strict=True)]
    quantities = {
        "import_again": Quantity(statistics.median(opened.again_s), "s"),
        "use_of_tensor": Quantity(statistics.median(opened.use_s), "s"),
    }
    return Measured(opened.sums, statistics.median(both), quantities)


def _prepare_open(device: Device) -> Work:
    def check(sums: list[float]) -> None:
        expected = [float(number) * (_TENSOR_BYTES // 4) for number in range(_NUM_HANDLES)]
        expect(sums == expected, "another tensor arrived")

    params: dict[str, int | float | str] = {"handles": _NUM_HANDLES, "bytes": _TENSOR_BYTES}
    return Work((self_timed("ipc", lambda: _open(device), check),), params, num_runs=_NUM_RUNS)


def _copy(device: Device, nbytes: int) -> Measured:
    with worker_processes(_ExportWorker, [device.name]) as group:
        handle = IpcHandle.from_bytes(ask(group, "give", nbytes))
        with device.memory.import_ipc(handle) as mapping:
            local, copy = mapping.tensor.clone(), torch.empty_like(mapping.tensor)
            seconds: dict[str, list[float]] = {"mapped": [], "local": []}
            for _ in range(_NUM_COPIES):
                for name, source in (("mapped", mapping.tensor), ("local", local)):
                    seconds[name].append(timed(functools.partial(copy.copy_, source), device)[1])
            del source
            copy.zero_()
            is_equal = torch.equal(copy.copy_(mapping.tensor), torch.arange(nbytes // 4, device=copy.device).float())
    mapped_s, local_s = (statistics.median(seconds[name]) for name in ("mapped", "local"))
    ratio = Quantity(mapped_s / local_s, "1")
    return Measured(is_equal, mapped_s, {"local_copy": Quantity(local_s, "s"), "ratio_to_local": ratio})


def _prepare_copy(device: Device) -> Work:
    nbytes = min(4 << 30, device.memory.info().free_bytes // 64)

    def check(is_equal: bool) -> None:
        expect(is_equal, "another tensor was copied")

    contender = self_timed("ipc", lambda: _copy(device, nbytes), check)
    return Work((contender,), {"bytes": nbytes}, bytes=2 * nbytes, num_runs=_NUM_RUNS)


cases = (
    Case(
        "ipc/open",
        "export a tensor and import it in another process, both warm; import it again; have its tensor",
        _prepare_open,
    ),
    Case(
        "ipc/copy", "copy a tensor of another process on the same device, beside a copy of a local one", _prepare_copy
    ),
)
