"""A plugin of pytest that makes simdev slow, and right, in this process: other processes are ahead of it."""

from __future__ import annotations

import os

from rlcore.conformance.peer import Peer

_started = Peer.__init__


def _quick(self: Peer, device_name: str, environment: dict[str, str] | None = None) -> None:
    _started(self, device_name, (environment or {}) | {"SIMDEV_LATENCY_US": "2000"})


os.environ["SIMDEV_LATENCY_US"] = "500000"
Peer.__init__ = _quick  # type: ignore[method-assign]
