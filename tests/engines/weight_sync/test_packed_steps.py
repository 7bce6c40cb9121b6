"""One slot is filled while the other is emptied, whichever side the calling thread is of."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from rlcore.engines.launchers.runtime_files import StoreFolder
from rlcore.engines.weight_sync.channels.peers import Call, SyncPeers
from rlcore.engines.weight_sync.transports.base import Surroundings
from rlcore.engines.weight_sync.transports.packed import PackedTransport

DEADLINE_S = 60.0


class Side(SyncPeers):
    """Packs or unpacks four buckets; the middle ones not before the other side has begun too."""

    def __init__(self, label: str, begun: dict[str, threading.Semaphore], *, is_here: bool, is_met: bool) -> None:
        self.label = label
        self._begun = begun
        self._is_here, self._is_met = is_here, is_met
        self.threads: list[threading.Thread] = []

    def call(self, method: str, calls: Sequence[Call] | None, timeout_s: float) -> list[Any]:
        self.threads.append(threading.current_thread())
        has_other = len(self.threads) > 1 if method == "pack" else len(self.threads) < 4
        if self._is_met and has_other:
            own, other = (self._begun[one] for one in (method, "unpack" if method == "pack" else "pack"))
            own.release()
            assert other.acquire(timeout=DEADLINE_S), f"{method} ran alone"
        return [10]

    def __len__(self) -> int:
        return 1

    @property
    def is_here(self) -> bool:
        return self._is_here


@pytest.mark.parametrize("here", ["nobody", "senders", "receivers", "both"])
def test_slots_are_filled_and_emptied_side_by_side(here: str) -> None:
    begun = {method: threading.Semaphore(0) for method in ("pack", "unpack")}
    is_met = here != "both"  # they share the calling thread
    senders = Side("trainer", begun, is_here=here in {"senders", "both"}, is_met=is_met)
    receivers = Side("sampler", begun, is_here=here in {"receivers", "both"}, is_met=is_met)
    transport = PackedTransport(senders, receivers, StoreFolder, Surroundings([], set(), []))
    transport._counts, transport._slot_bytes = {"plan": [4]}, 1024
    assert transport.move(1, ["plan"], lambda step: False, lambda: DEADLINE_S) == 40
    for side in (senders, receivers):
        assert len(side.threads) == 4
        if side.is_here:
            assert set(side.threads) == {threading.current_thread()}
