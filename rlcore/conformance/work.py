"""Work that keeps a device busy for a while, and device memory that is really allocated."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping, Sequence

import torch

from rlcore.device import Device
from rlcore.registry import get_device

MB = 2**20
_BUSY_S = 0.03
_TRIES = 5


def filled(device: Device, num_bytes: int) -> torch.Tensor:
    """Return written device memory, because a page that was never written may not be allocated."""
    return torch.ones(num_bytes, dtype=torch.uint8, device=device.torch_device)


class BusyWork:
    """About 30 ms of work, so that work queued after it is not done when the host looks."""

    @staticmethod
    def of(device: Device) -> BusyWork:
        """Return the instance of this process: measuring the number of steps takes longer than most tests."""
        return _busy_work(device.name)

    def __init__(self, device: Device) -> None:
        self._device = device
        # A step on so many values takes longer than queueing it, so that the host gets ahead.
        self._values = torch.ones(64 * MB // 4, device=device.torch_device)
        self.num_steps = 1
        # The fastest of three, because other processes may have used the processor.
        while self.num_steps < 1 << 14 and min(self._seconds() for _ in range(3)) < _BUSY_S:
            self.num_steps *= 2

    def queue(self, times: int = 1) -> None:
        """Queue the work on the current stream."""
        for _ in range(self.num_steps * times):
            self._values.mul_(1.0)

    def finish(self) -> None:
        """Wait for the current stream by reading a value, so that the test does not rely on the device's own waits."""
        self._values[-1].item()

    def _seconds(self) -> float:
        self.finish()
        began = time.perf_counter()
        self.queue()
        self.finish()
        return time.perf_counter() - began


@functools.cache
def _busy_work(device_name: str) -> BusyWork:
    return BusyWork(get_device(device_name))


def grown(states: Sequence[Mapping[str, int]], may_grow: Mapping[str, int]) -> set[str]:
    """Return the figures that grew from each state to the next by more than ``may_grow`` allows.

    A leak grows every time; other needs and processes that are just ending may grow a figure once.
    """
    steps = list(itertools.pairwise(states))
    return {
        what for what in states[0] if all(after[what] - then[what] > may_grow.get(what, 0) for then, after in steps)
    }


def is_asynchronous(device: Device) -> bool:
    """Return True if the host gets ahead of the device in one of several tries; other processes may slow the host."""
    return _is_asynchronous(device.name)


@functools.cache
def _is_asynchronous(device_name: str) -> bool:
    device, busy = get_device(device_name), _busy_work(device_name)
    stream = device.streams.new()
    for _ in range(_TRIES):
        with device.streams.use(stream):
            busy.queue()
            is_ahead = not stream.query()
        stream.synchronize()
        if is_ahead:
            return True
    return False
