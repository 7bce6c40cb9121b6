"""The way to the agent of a host, as the parts that use it see it: a process there, and the heartbeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from rlcore.engines.launchers.ray.wire import Posted


class AgentLink(Protocol):
    """The agent of a host. After the loss of the host ``why_lost`` says why, and every question raises StateError."""

    host: str
    why_lost: str

    def post(self, posted: Posted, tensors: Sequence[Tensor] = ()) -> None:
        """Take a message for a worker, which goes with the next ``flush``; see ``Outbox.post``."""

    def flush(self) -> None:
        """Send all that was posted; nothing happens when the host is lost."""

    def stack(self, process: int) -> str:
        """Return the stack of a process there."""

    def kill(self, process: int, because: str) -> None:
        """End a process there, or give the host up; ``because`` is what its workers are told."""

    def beat(self, timeout_s: float) -> None:
        """Tell the agent that the program lives, and hear which of its processes are stopped."""

    def lose(self, why: str) -> None:
        """Give the host up: fail all calls to its workers, and end its agent, which ends them."""
