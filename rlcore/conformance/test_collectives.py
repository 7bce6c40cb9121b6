"""Groups of ranks on the device's own collective library, each rank in a process and on a device of its own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.conformance.peer import Peer, PeerError, PeerPool
from rlcore.conformance.work import grown
from rlcore.device import Device
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.registry import get_device
from rlcore.types import Capability

TASKS = "rlcore.conformance.collective_tasks"
WORLD_SIZE = 2
CYCLES, SPANS = 4, 3
MAY_GROW = {"descriptors": CYCLES // 2, "threads": CYCLES // 2, "allocated bytes": 2**20}


class Ranks:
    """Processes that are asked the same at once."""

    def __init__(self, peers: list[Peer], folder: Path) -> None:
        self._peers = peers
        self._folder = folder

    def ask(self, task: str, *arguments: Any) -> list[Any]:
        """Answers by rank."""
        return self._all(task, lambda rank: arguments)

    def form(self, task: str) -> list[Any]:
        return self._all(task, lambda rank: (rank, len(self._peers), str(self._folder)))

    def _all(self, task: str, arguments: Any) -> list[Any]:
        for rank, peer in enumerate(self._peers):
            peer.begin(f"{TASKS}:{task}", *arguments(rank))
        answers: list[Any] = []
        errors: list[PeerError] = []
        for peer in self._peers:
            try:
                answers.append(peer.answer())
            except PeerError as error:  # the others' answers are not left for the next test
                errors.append(error)
        if errors:
            raise errors[0]
        return answers


def wrong(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what is not right, with the rank and what it found."""
    return {
        f"rank {rank}: {what}": found
        for rank, answer in enumerate(answers)
        for what, found in answer.items()
        if found not in ("ok", "unsupported", True)
    }


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, peers: PeerPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    device = get_device(request.config.getoption("--device"))
    if device.count() < WORLD_SIZE:
        pytest.skip(f"{WORLD_SIZE} ranks need a device each; there is {device.count()} {device.spec.name} device")
    of_ranks = [peers.of(f"{device.spec.name}:{rank}")[0] for rank in range(WORLD_SIZE)]
    ranks = Ranks(of_ranks, tmp_path_factory.mktemp("rendezvous"))
    ranks.form("form")
    yield ranks
    ranks.ask("destroy")


@pytest.mark.covers("collectives.reduce_ops", "collectives.dtypes")
def test_every_reduction_is_right_or_refused_as_declared(ranks: Ranks) -> None:
    assert not wrong(ranks.ask("reductions"))


@pytest.mark.covers("collectives.reduce_ops", "collectives.dtypes")
def test_nan_and_infinity_of_one_rank_reach_all(ranks: Ranks) -> None:
    assert not wrong(ranks.ask("not_finite"))


@pytest.mark.covers("collectives.backend")
def test_tensors_of_many_elements_are_right_to_their_end(ranks: Ranks) -> None:
    assert not wrong(ranks.ask("of_many_elements"))


@pytest.mark.covers("collectives.backend")
def test_tensors_of_no_elements_are_taken(ranks: Ranks) -> None:
    assert not wrong(ranks.ask("of_no_elements"))


@pytest.mark.covers("collectives.backend")
def test_every_movement_of_tensors_is_right(ranks: Ranks) -> None:
    assert not wrong(ranks.ask("movements"))


@pytest.mark.covers("collectives.backend")
@pytest.mark.parametrize("is_new", [False, True], ids=["the first stream", "a new stream"])
def test_a_collective_comes_after_what_was_queued_before_it(ranks: Ranks, is_new: bool) -> None:
    assert ranks.ask("collective_follows_the_stream", is_new) == [[3.0 * WORLD_SIZE * 2]] * WORLD_SIZE


@pytest.mark.covers("collectives.backend")
def test_a_group_can_be_destroyed_and_rebuilt(ranks: Ranks) -> None:
    assert ranks.ask("rebuild") == [[WORLD_SIZE] * 2] * WORLD_SIZE


@pytest.mark.covers("collectives.backend")
def test_destroying_and_forming_a_group_leaves_nothing(ranks: Ranks) -> None:
    states, leaked = [ranks.ask("cycles", CYCLES) for _ in range(2)][1:], {"?"}
    while leaked and len(states) <= SPANS:
        states.append(ranks.ask("cycles", CYCLES))
        leaked = set[str]().union(*(grown(of_rank, MAY_GROW) for of_rank in zip(*states, strict=True)))
    assert not leaked, states


@pytest.mark.covers("collectives.init_kwargs")
def test_torchs_default_group_is_made_with_init_kwargs(ranks: Ranks) -> None:
    total = WORLD_SIZE * (WORLD_SIZE - 1) / 2
    expected = [WORLD_SIZE * value + total for value in range(3)]
    assert ranks.form("default_group") == [[expected, True]] * WORLD_SIZE


@pytest.mark.covers("collectives.reduce_ops", "collectives.dtypes")
def test_operators_and_dtypes_are_declared_each_with_a_reason_where_not_native(device: Device) -> None:
    ops, dtypes = device.collectives.reduce_ops(), device.collectives.dtypes()
    assert {"sum", "min", "max"} <= {op for op, how in ops.items() if how.support != "unsupported"}
    assert {torch.float32, torch.bfloat16, torch.int64} <= {
        d for d, how in dtypes.items() if how.support != "unsupported"
    }
    for how in [*ops.values(), *dtypes.values()]:
        assert isinstance(how, Capability)
        assert how.support == "native" or how.reason


@pytest.mark.covers("collectives.init_kwargs")
def test_a_timeout_that_is_none_is_refused(device: Device) -> None:
    with pytest.raises(InvalidInputError, match="timeout_s must be more than 0 seconds, got 0"):
        device.collectives.init_kwargs(timeout_s=0)
    assert device.collectives.init_kwargs(timeout_s=7)["timeout"] == timedelta(seconds=7)


@pytest.mark.covers("collectives.init_kwargs")
def test_a_high_priority_stream_is_given_or_refused_with_the_reason(device: Device) -> None:
    try:
        assert "pg_options" in device.collectives.init_kwargs(is_high_priority=True)
    except UnsupportedError as error:
        assert device.name in error.feature
        assert error.reason
