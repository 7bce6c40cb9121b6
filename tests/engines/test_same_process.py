"""Where the workers of an engine run: two hosts, or two containers, may give their processes the same numbers."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.engines.residency import Move, State
from rlcore.engines.swapping.participants import TagMove, participants_of
from rlcore.engines.weight_sync.channels.peers import WorkerPeers
from rlcore.process.status import boot_id, process_name


def group_on(host: str) -> Any:
    """Return a group with one worker, whose process has the number of this one."""
    worker = SimpleNamespace(
        process_id=os.getpid(),
        process=process_name(os.getpid()).replace(boot_id(), host),
        context=SimpleNamespace(device_name="cpu:0"),
    )
    return SimpleNamespace(engine="engine 1", workers=[worker], call=lambda *_, **__: [[]])


@pytest.mark.parametrize("host", [boot_id(), "another host"])
def test_only_a_worker_of_this_process_runs_in_the_calling_thread(host: str) -> None:
    group = group_on(host)
    assert WorkerPeers(group, 1.0).is_here == (host == boot_id())
    engine: Any = SimpleNamespace(_built_group=lambda: group, label="engine 1")
    (participant,) = participants_of([TagMove(engine, 0, Move.OFFLOAD, "weights", State.LOADED, State.OFFLOADED)])
    assert participant.runs_here == (host == boot_id())


def test_engines_on_two_hosts_share_no_process_whatever_its_number() -> None:
    engines: list[Any] = [
        SimpleNamespace(_built_group=lambda host=host: group_on(host), label=host) for host in ("a", "b")
    ]
    moves = [TagMove(engine, 0, Move.OFFLOAD, "weights", State.LOADED, State.OFFLOADED) for engine in engines]
    assert len(participants_of(moves)) == 2
