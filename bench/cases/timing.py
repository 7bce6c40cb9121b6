"""Seconds by the host's clock and sizes of host memory, phases of a step, contenders that measure themselves."""

from __future__ import annotations

import contextlib
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlcore.bench.case import Contender, Quantity
from rlcore.device import Device


class Measured(NamedTuple):
    """One run that timed itself."""

    result: Any
    """The value that the contender's check takes."""
    seconds: float | Sequence[float]
    quantities: Mapping[str, Quantity] = {}


def self_timed(
    implementation: str, run: Callable[[], Measured], check: Callable[[Any], None], **options: Any
) -> Contender:
    """Return a contender of what ``run`` measured; ``options`` are those of ``Contender``."""
    return Contender(
        implementation,
        run,
        lambda done: check(done.result),
        seconds=lambda done: done.seconds,
        quantities=lambda done: done.quantities,
        **options,
    )


def timed(function: Callable[[], Any], *devices: Device) -> tuple[Any, float]:
    """Return what ``function`` returned and its seconds, from idle devices until they are idle again."""
    for device in devices:
        device.synchronize()
    started = time.perf_counter()
    found = function()
    for device in devices:
        device.synchronize()
    return found, time.perf_counter() - started


def median_time(count: int, function: Callable[[], Any], *devices: Device, warm_up: int = 0) -> tuple[Any, float]:
    """Return the last result and the median seconds of ``count`` calls; those that warm up come before them."""
    calls = [timed(function, *devices) for _ in range(warm_up + count)]
    return calls[-1][0], statistics.median(seconds for _, seconds in calls[warm_up:])


class PhaseTimes:
    """The seconds of the phases of one step, each until the device is idle."""

    def __init__(self, device: Device, names: Iterable[str]) -> None:
        self.seconds = dict.fromkeys(names, 0.0)
        self._device = device

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._device.synchronize()
        self.seconds[name] += time.perf_counter() - started


class PeakWatch:
    """The greatest value since the start, seen by a thread that looks again and again."""

    def __init__(self, look: Callable[[], int], every_s: float) -> None:
        self._look, self._every_s = look, every_s
        self.first = self.peak = look()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_over.wait(self._every_s):
            self.peak = max(self.peak, self._look())

    def end(self) -> int:
        """Return the peak. The thread has ended: one that is in a driver when Python ends would abort the program."""
        self._is_over.set()
        self._thread.join()
        self.peak = max(self.peak, self._look())
        return self.peak


def proc_bytes(file: str, field: str) -> int:
    """Return a field of a file in /proc that is given in kB, such as "RssAnon" of "self/status"."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc", file).read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
