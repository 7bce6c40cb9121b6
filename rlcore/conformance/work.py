"""Work for a device that takes a while, and memory of it that is really there."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

MB = 2**20
_BUSY_S = 0.03
_TRIES = 5


def filled(device: Any, num_bytes: int) -> torch.Tensor:
    """Written, because a page that was never written may not be there."""
    return torch.ones(num_bytes, dtype=torch.uint8, device=device.torch_device)


class BusyWork:
    """About 30 ms of work, so that what is queued behind it has not happened when the host looks."""

    @staticmethod
    @functools.cache
    def of(device: Any) -> BusyWork:
        """The one of this process, as measuring how much that is takes longer than most tests."""
        return BusyWork(device)

    def __init__(self, device: Any) -> None:
        self._device = device
        # So large that a step takes longer than queueing it: else the host would never get ahead.
        self._values = torch.ones(64 * MB // 4, device=device.torch_device)
        self.num_steps = 1
        # The fastest of three: somebody else may have had the processor.
        while self.num_steps < 1 << 14 and min(self._seconds() for _ in range(3)) < _BUSY_S:
            self.num_steps *= 2

    def queue(self, times: int = 1) -> None:
        """On the current stream."""
        for _ in range(self.num_steps * times):
            self._values.mul_(1.0)

    def finish(self) -> None:
        """What was queued on the current stream is done: a value of it is read, so that no wait needs to be right."""
        self._values[-1].item()

    def _seconds(self) -> float:
        self.finish()
        began = time.perf_counter()
        self.queue()
        self.finish()
        return time.perf_counter() - began


def grown(states: Sequence[Mapping[str, int]], may_grow: Mapping[str, int]) -> set[str]:
    """What has grown from each state to the next by more than it may.

    What is leaked does; once may grow what something else needed, or what was just ending.
    """
    steps = list(itertools.pairwise(states))
    return {
        what for what in states[0] if all(after[what] - then[what] > may_grow.get(what, 0) for then, after in steps)
    }


@functools.cache
def is_asynchronous(device: Any) -> bool:
    """Whether the host gets ahead of the device: in one of some tries, because the host may lose its processor."""
    busy = BusyWork.of(device)
    stream = device.streams.new()
    for _ in range(_TRIES):
        with device.streams.use(stream):
            busy.queue()
            is_ahead = not stream.query()
        stream.synchronize()
        if is_ahead:
            return True
    return False
