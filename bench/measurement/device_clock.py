"""A clock for the time that work takes on a device, without the time in which the host queues it.

A device that waits for the host starts a timed run before the host has queued all of it. So it is given other work
first, for as long as the host takes; the run is measured between two events behind that work.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rlcore.device import Device

_FLUSH_BYTES = 256 << 20
"""More than the last cache of any accelerator known here; as in triton.testing.do_bench."""
_HOST_FLUSH_BYTES = 32 << 20
"""More than the caches of the cores; those that sockets share hold more, and take too long to overwrite."""
_LONGEST_S = 50e-3
"""The longest time of the host to queue that is hidden."""
_MARGIN = 2.0
"""The host does not always take equally long; and queueing the other work takes a part of it."""
_ATTEMPTS = 3
_FLUSHES_TIMED = 5


class Flush:
    """Overwrites the caches of the device or, for what runs on the host, of the host; takes memory when first used."""

    def __init__(self, device: Device, *, is_host: bool) -> None:
        self._nbytes = _HOST_FLUSH_BYTES if is_host else _FLUSH_BYTES
        self._device = "cpu" if is_host else device.torch_device
        self._buffer: torch.Tensor | None = None

    def __call__(self) -> None:
        if self._buffer is None:
            self._buffer = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        self._buffer.zero_()


class Launched(NamedTuple):
    """A timed run."""

    output: Any
    seconds: float
    """The time of one of the runs, on the device."""
    is_hidden: bool
    """The device began when the host had queued everything."""


class DeviceClock:
    """Times runs that only queue work on the device's current stream."""

    def __init__(self, device: Device, flush: Flush) -> None:
        self._device = device
        self._flush = flush
        self._num_flushes = 0

    def can_hide(self, run: Callable[[], Any], runs: int, queued_s: float) -> bool:
        """Find how much other work hides ``runs`` runs, each of which the host queues in ``queued_s``.

        False: the host takes too long, or waits for the device on the way.
        """
        to_hide_s = queued_s * _num_queued(runs)
        if to_hide_s > _LONGEST_S or self._flush_s > _LONGEST_S:
            return False
        most = int(_LONGEST_S / self._flush_s)
        self._num_flushes = min(most, math.ceil(_MARGIN * to_hide_s / self._flush_s))
        return self.time(run, runs).is_hidden

    def time(self, run: Callable[[], Any], runs: int) -> Launched:
        """Find a cold cache where ``runs`` is 1, else that which one more run leaves behind. Some attempts to hide."""
        launched = self._attempt(run, runs)
        for _ in range(_ATTEMPTS - 1):
            if not launched.is_hidden:
                del launched  # so that memory holds one output, not two
                launched = self._attempt(run, runs)
        return launched

    def _attempt(self, run: Callable[[], Any], runs: int) -> Launched:
        self._device.synchronize()
        for _ in range(self._num_flushes):
            self._flush()
        for _ in range(_num_queued(runs) - runs):
            run()
        return self._between_events(run, runs)

    @functools.cached_property
    def _flush_s(self) -> float:
        self._flush()  # takes its memory
        self._device.synchronize()
        return self._between_events(self._flush, _FLUSHES_TIMED).seconds

    def _between_events(self, run: Callable[[], Any], runs: int) -> Launched:
        start, end = (self._device.streams.event(timing=True) for _ in range(2))
        start.record()
        for _ in range(runs):
            output = run()
        end.record()
        is_hidden = not start.query()
        self._device.synchronize()
        return Launched(output, start.elapsed_time(end) / 1000 / runs, is_hidden)


def _num_queued(runs: int) -> int:
    return runs if runs == 1 else runs + 1
