"""What it costs to use another process's memory: to get at it, to use it again, to copy from it.

The other process is a worker on the same device. Without one handle opened before ("warm") a first one pays for the
connection, and on a GPU for the mapping.
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch

from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.worker_processes import TIMEOUT_S, ask, worker_processes
from rlcore.device import Device
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.types import IpcHandle

_NUM_RUNS = 5
_NUM_HANDLES = 200
_TENSOR_BYTES = 1 << 20
_NUM_COPIES = 10


class _Opened(NamedTuple):
    seconds: list[float]
    """To import each handle."""
    again_s: list[float]
    """To import a handle that is open."""
    use_s: list[float]
    """To have the tensor of a mapping."""
    sums: list[float]


class _Importer:
    """Opens what it is given."""

    def __init__(self, context: WorkerContext) -> None:
        self._memory = context.device.memory

    def open(self, handles: list[bytes]) -> _Opened:
        mappings, seconds, again_s, use_s = [], [], [], []
        for data in handles:
            started = time.perf_counter()
            mappings.append(self._memory.import_ipc(IpcHandle.from_bytes(data)))
            seconds.append(time.perf_counter() - started)
        for mapping in mappings:
            started = time.perf_counter()
            again = self._memory.import_ipc(mapping.handle)
            again_s.append(time.perf_counter() - started)
            again.close()
        for mapping in mappings:
            started = time.perf_counter()
            _ = mapping.tensor
            use_s.append(time.perf_counter() - started)
        sums = [mapping.tensor.sum(dtype=torch.float64).item() for mapping in mappings]
        for mapping in mappings:
            mapping.close()
        return _Opened(seconds, again_s, use_s, sums)

    def close(self) -> None:
        pass


class _Exporter:
    """Gives one large tensor."""

    def __init__(self, context: WorkerContext) -> None:
        self._device = context.device

    def give(self, nbytes: int) -> bytes:
        self._tensor = torch.arange(nbytes // 4, dtype=torch.float32, device=self._device.torch_device)
        self._device.synchronize()
        self._handle = self._device.memory.export_ipc(self._tensor)
        return bytes(self._handle.to_bytes())

    def close(self) -> None:
        pass


class _Costs(NamedTuple):
    sums: list[float]
    open_s: float
    again_s: float
    use_s: float


def _measure(device: Device) -> _Costs:
    tensors = [
        torch.full((_TENSOR_BYTES // 4,), float(number), device=device.torch_device) for number in range(_NUM_HANDLES)
    ]
    device.synchronize()
    with worker_processes(_Importer, [device.name]) as group:
        ask(group, "open", [device.memory.export_ipc(tensors[0]).to_bytes()])
        export_s, handles = [], []
        for tensor in tensors:
            started = time.perf_counter()
            handles.append(device.memory.export_ipc(tensor))
            export_s.append(time.perf_counter() - started)
        opened = ask(group, "open", [handle.to_bytes() for handle in handles])
        for handle in handles:
            device.memory.revoke(handle, timeout_s=TIMEOUT_S)
    return _Costs(
        opened.sums,
        statistics.median(export + import_ for export, import_ in zip(export_s, opened.seconds, strict=True)),
        statistics.median(opened.again_s),
        statistics.median(opened.use_s),
    )


def _prepare_open(device: Device) -> Work:
    def check(costs: _Costs) -> None:
        expected = [float(number) * (_TENSOR_BYTES // 4) for number in range(_NUM_HANDLES)]
        expect(costs.sums == expected, "another tensor arrived")

    contender = Contender(
        implementation="ipc",
        run=lambda: _measure(device),
        check=check,
        seconds=lambda costs: float(costs.open_s),
        quantities=lambda costs: {
            "import_again": Quantity(costs.again_s, "s"),
            "use_of_tensor": Quantity(costs.use_s, "s"),
        },
    )
    return Work(contenders=(contender,), params={"handles": _NUM_HANDLES, "bytes": _TENSOR_BYTES}, num_runs=_NUM_RUNS)


class _Copies(NamedTuple):
    is_equal: bool
    mapped_s: float
    local_s: float


def _copy(device: Device, nbytes: int) -> _Copies:
    with worker_processes(_Exporter, [device.name]) as group:
        handle = IpcHandle.from_bytes(ask(group, "give", nbytes))
        with device.memory.import_ipc(handle) as mapping:
            local, copy = mapping.tensor.clone(), torch.empty_like(mapping.tensor)
            seconds: dict[str, list[float]] = {"mapped": [], "local": []}
            for _ in range(_NUM_COPIES):
                for name, source in (("mapped", mapping.tensor), ("local", local)):
                    device.synchronize()
                    started = time.perf_counter()
                    copy.copy_(source)
                    device.synchronize()
                    seconds[name].append(time.perf_counter() - started)
            del source
            copy.zero_()
            is_equal = torch.equal(copy.copy_(mapping.tensor), torch.arange(nbytes // 4, device=copy.device).float())
    return _Copies(is_equal, statistics.median(seconds["mapped"]), statistics.median(seconds["local"]))


def _prepare_copy(device: Device) -> Work:
    nbytes = min(4 << 30, device.memory.info().free_bytes // 64)

    def check(copies: _Copies) -> None:
        expect(copies.is_equal, "another tensor was copied")

    contender = Contender(
        implementation="ipc",
        run=lambda: _copy(device, nbytes),
        check=check,
        seconds=lambda copies: float(copies.mapped_s),
        quantities=lambda copies: {
            "local_copy": Quantity(copies.local_s, "s"),
            "ratio_to_local": Quantity(copies.mapped_s / copies.local_s, "1"),
        },
    )
    return Work(contenders=(contender,), params={"bytes": nbytes}, bytes=2 * nbytes, num_runs=_NUM_RUNS)


open_case = Case(
    name="ipc/open",
    description="export a tensor and import it in another process, both warm; import it again; have its tensor",
    prepare=_prepare_open,
)
copy_case = Case(
    name="ipc/copy",
    description="copy a tensor of another process on the same device, beside a copy of a local one",
    prepare=_prepare_copy,
)
