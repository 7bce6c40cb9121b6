"""Figures of device and host while a case runs, and reasons to doubt the numbers."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rlcore.bench.record import CROWDED, Readings, Telemetry
from rlcore.device import Device
from rlcore.errors import DeviceError, MissingDependencyError, UnsupportedError
from rlcore.process.status import family_seconds

_SHARED = 0.1
"""The share of the host's processor time used by others from which on it is worth a mark."""
_LEAST_LEFT = 0.75
"""The part of one processor that others must leave for a case to have one to itself most of the time."""
_LEAST_S = 0.2
"""The least processor time from which a share is computed: Linux counts hundredths of a second."""
_N = TypeVar("_N", int, float)
_UNTOLD = (DeviceError, MissingDependencyError, UnsupportedError)
_RAPL = Path("/sys/class/powercap")


class Monitor:
    """Reads the figures of the device when the caller asks, between samples: a thread would disturb what is timed."""

    def __init__(self, device: Device) -> None:
        """Make it before the case has anything on the device."""
        self._device = device
        self._readings: list[Any] = []
        self._others = _told(lambda: len(device.processes()))
        self._start = _processor_seconds()

    def read(self) -> None:
        if reading := _told(self._device.telemetry):
            self._readings.append(reading)

    def energy_j(self) -> float | None:
        """Return the energy used since some moment in the past; None where nothing counts it."""
        if self._device.spec.is_host:
            return _host_energy_j()
        reading = _told(self._device.telemetry)
        return None if reading is None else reading.energy_j

    def telemetry(self) -> Telemetry:
        reasons = [reading.throttle_reasons for reading in self._readings if reading.throttle_reasons is not None]
        limits = [reading.power_limit_w for reading in self._readings if reading.power_limit_w is not None]
        return Telemetry(
            clock_mhz=self._spread("sm_clock_mhz"),
            memory_clock_mhz=self._spread("memory_clock_mhz"),
            power_w=self._spread("power_w"),
            power_limit_w=limits[-1] if limits else None,
            temperature_c=self._spread("temperature_c"),
            throttle_reasons=sorted({reason for seen in reasons for reason in seen}) if reasons else None,
            other_processes=self._others,
            host_share_of_others=self._host_share_of_others(),
        )

    def _spread(self, field: str) -> Readings | None:
        values = [value for reading in self._readings if (value := getattr(reading, field)) is not None]
        return Readings(min=min(values), median=statistics.median(values), max=max(values)) if values else None

    def _host_share_of_others(self) -> float | None:
        if self._start is None or (now := _processor_seconds()) is None:
            return None
        busy, available, own = (b - a for a, b in zip(self._start, now, strict=True))
        return min(1.0, max(0.0, busy - own) / available) if available > _LEAST_S else None


def marks(telemetry: Telemetry) -> list[str]:
    """Why numbers measured meanwhile may be too bad; empty when nothing speaks against them."""
    found = []
    if telemetry.throttle_reasons:
        found.append(f"throttled: {', '.join(telemetry.throttle_reasons)}")
    if telemetry.other_processes:
        found.append(f"shared: {telemetry.other_processes} other processes on the device")
    if (others := telemetry.host_share_of_others or 0.0) > _SHARED:
        is_crowded = others > 1 - _LEAST_LEFT / (os.cpu_count() or 1)
        found.append(CROWDED if is_crowded else "shared: others used the host's processors")
    return found


def joined(first: Telemetry, second: Telemetry) -> Telemetry:
    """Join what two processes that measured the same case saw."""
    readings = {
        name: _joined_readings(getattr(first, name), getattr(second, name))
        for name in ("clock_mhz", "memory_clock_mhz", "power_w", "temperature_c")
    }
    reasons = {*(first.throttle_reasons or ()), *(second.throttle_reasons or ())}
    return msgspec.structs.replace(
        second,
        **readings,
        throttle_reasons=None if second.throttle_reasons is None else sorted(reasons),
        other_processes=_greater(first.other_processes, second.other_processes),
        host_share_of_others=_greater(first.host_share_of_others, second.host_share_of_others),
    )


def _joined_readings(first: Readings | None, second: Readings | None) -> Readings | None:
    if first is None or second is None:
        return second or first
    middle = (first.median + second.median) / 2
    return Readings(min=min(first.min, second.min), median=middle, max=max(first.max, second.max))


def _greater(first: _N | None, second: _N | None) -> _N | None:
    return max((value for value in (first, second) if value is not None), default=None)


def _told(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except _UNTOLD:
        return None


def _processor_seconds() -> tuple[float, float, float] | None:
    """Return the machine's busy and available time, and that of this process with all that descend from it."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, idle, iowait, irq, softirq, steal = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields)
    busy = user + nice + system + irq + softirq + steal
    return busy, busy + idle + iowait, family_seconds(os.getpid())


def _host_energy_j() -> float | None:
    """Return the energy of the processor packages, by Linux's powercap; the counters wrap after hours."""
    counters = sorted(_RAPL.glob("intel-rapl:?/energy_uj")) if _RAPL.is_dir() else []
    try:
        readings = [int(counter.read_text()) for counter in counters]
    except OSError:  # root alone may read them
        return None
    return sum(readings) / 1e6 if readings else None
