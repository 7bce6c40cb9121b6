"""The limits that cases are measured against: what this machine reaches when nothing is in the way.

A limit is the best of many runs of the plainest operation: torch's own matrix product, one large copy. Limits are kept
in the cache folder. They are measured again when they are a week old, when device, driver, torch or its number of
threads have changed, or, on a host, when others used it meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch

from rlcore.atomic import write_file
from rlcore.bench.measurement.telemetry import Monitor, marks
from rlcore.bench.record import Calibration, Effort, Record
from rlcore.device import Device
from rlcore.errors import RlcoreError, UnsupportedError
from rlcore.registry import get_device
from rlcore.settings import Settings
from rlcore.tensor_data import dtype_name

_STALE = timedelta(days=7)
_BUDGET_S: dict[Effort, float] = {"quick": 0.15, "standard": 0.5, "full": 1.0}
"""For each size of each limit."""
_LONG_S = 1.0
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The best of these is within a few per cent of the best of all: anchors of one H200, M x N x K.
_PRODUCTS = ((8192, 8192, 8192), (4096, 8192, 4096), (8192, 8192, 2048))
_HOST_PRODUCTS = ((1024, 1024, 1024), (512, 512, 512))
_MEMORY_BYTES, _HOST_MEMORY_BYTES, _COPY_BYTES = 1 << 30, 1 << 28, 1 << 28


def calibrate(device: Device, effort: Effort = "standard") -> Calibration:
    """Measure every limit of ``device``; takes seconds."""
    measures: dict[str, Callable[[Any, float], float]] = {
        **{f"product/{dtype_name(dtype)}": _product(dtype) for dtype in _DTYPES},
        "memory": _memory,
        **{
            f"{way}/{kind}": _copy(way == "to_device", kind == "pinned")
            for way in ("to_device", "to_host")
            for kind in ("pinned", "pageable")
        },
        "link": _link,
    }
    limits, blocked, monitor = {}, {}, Monitor(device)
    for name, measure in measures.items():
        monitor.read()
        try:
            limits[name] = measure(device, _BUDGET_S[effort])
        except (RlcoreError, RuntimeError, MemoryError) as error:  # RuntimeError: torch has no such product
            blocked[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    measured_at = datetime.now(UTC).isoformat(timespec="seconds")
    return Calibration(measured_at=measured_at, limits=limits, blocked=blocked, marks=marks(monitor.telemetry()))


def shortest_s(device: Device, run: Callable[[], Any], budget_s: float) -> float:
    """Return the seconds of the shortest run of those that fit into the budget, launches included.

    There are at least three runs, unless one is so long that nothing disturbs it.
    """
    best, started, runs = float("inf"), time.perf_counter(), 0
    while runs == 0 or (spent := time.perf_counter() - started) < budget_s or (runs < 3 and spent < _LONG_S):
        device.synchronize()
        begin = time.perf_counter()
        run()
        device.synchronize()
        seconds = time.perf_counter() - begin
        best, runs = min(best, seconds), runs + 1
    return best


def _product(dtype: torch.dtype) -> Callable[[Any, float], float]:
    def measure(device: Device, budget_s: float) -> float:
        rates = []
        for M, N, K in _HOST_PRODUCTS if device.spec.is_host else _PRODUCTS:
            a_MK, b_KN = (torch.randn(*shape, device=device.torch_device).to(dtype) for shape in ((M, K), (K, N)))
            out_MN = a_MK @ b_KN
            run = functools.partial(torch.mm, a_MK, b_KN, out=out_MN)
            rates.append(2 * M * N * K / shortest_s(device, run, budget_s))
        return max(rates)

    return measure


def _memory(device: Device, budget_s: float) -> float:
    nbytes = _HOST_MEMORY_BYTES if device.spec.is_host else _MEMORY_BYTES
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device.torch_device) for _ in range(2))
    return 2 * nbytes / shortest_s(device, lambda: target.copy_(source), budget_s)


def _copy(is_to_device: bool, is_pinned: bool) -> Callable[[Any, float], float]:
    def measure(device: Device, budget_s: float) -> float:
        if device.spec.is_host:
            raise UnsupportedError("a copy between host and device", "the device is the host itself")
        if is_pinned and not device.memory.can_pin:
            raise UnsupportedError("pinned memory", "this device cannot pin memory of the host")
        host = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
        there = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device.torch_device)
        to, from_ = (there, host) if is_to_device else (host, there)
        return _COPY_BYTES / shortest_s(device, lambda: to.copy_(from_, non_blocking=True), budget_s)

    return measure


def _link(device: Device, budget_s: float) -> float:
    """Measure the link from this device to the next one, by a copy that either side drives."""
    if device.spec.is_host:
        raise UnsupportedError("a link between devices", "the device is the host itself")
    if device.count() < 2:
        raise UnsupportedError("a link between devices", f"there is one {device.spec.name} device")
    other = get_device(f"{device.spec.name}:{(device.index + 1) % device.count()}")
    here = torch.ones(_MEMORY_BYTES, dtype=torch.uint8, device=device.torch_device)
    there = torch.ones(_MEMORY_BYTES, dtype=torch.uint8, device=other.torch_device)

    def run() -> None:
        there.copy_(here, non_blocking=True)
        other.synchronize()

    return _MEMORY_BYTES / shortest_s(device, run, budget_s)


# -------------------------------------------------------------------------------------------------- on disk


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    valid_for: dict[str, str]
    effort: Effort
    calibration: Calibration


class Store:
    """The file that keeps the limits of the machine that a record describes."""

    def __init__(self, record: Record) -> None:
        system = record.system
        self._effort = record.effort
        self._path = Settings.from_env().cache / f"bench-limits-{system.device.replace(':', '-')}.json"
        self._valid_for = {
            "accelerator": system.accelerator_model_name,
            "processor": system.host,
            "framework": system.framework,
            "threads": str(record.num_threads),
            **system.other_software_stack,
        }

    def load(self) -> Calibration | None:
        """Return None if it is absent, stale, unreadable, of another or a shared machine, or of less effort."""
        try:
            stored = msgspec.json.decode(self._path.read_bytes(), type=_Stored)
            age = datetime.now(UTC) - datetime.fromisoformat(stored.calibration.measured_at)
        except (OSError, msgspec.DecodeError, ValueError, TypeError):
            return None
        is_enough = _BUDGET_S[stored.effort] >= _BUDGET_S[self._effort]
        is_valid = is_enough and stored.valid_for == self._valid_for and age < _STALE
        # What accelerators reach, other processes of the host change little.
        is_doubtful = not self._valid_for["accelerator"] and stored.calibration.marks
        return stored.calibration if is_valid and not is_doubtful else None

    def save(self, calibration: Calibration) -> None:
        """Write the limits; where the cache cannot be written the next run measures again."""
        with contextlib.suppress(OSError):
            Path(self._path.parent).mkdir(parents=True, exist_ok=True)
            stored = _Stored(valid_for=self._valid_for, effort=self._effort, calibration=calibration)
            write_file(self._path, msgspec.json.encode(stored))
