"""The cases of the copies of a weight sync pass on a host, and refuse what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from once import run_once

from rlcore.bench.case import load_cases
from rlcore.bench.cases import weight_sync_copies
from rlcore.bench.cases.models import QWEN_7B, QWEN_30B_A3B, ModelShape
from rlcore.kernels.strided_copy.op import ViewCopies
from rlcore.registry import get_device

NAMES = [f"weight_sync/copies/{name}" for name in ("7b", "7b_float32", "7b_tp2", "30b_a3b")]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync_copies, "_ON_HOST", 64)


@pytest.mark.parametrize("name", NAMES[1:])
def test_case_passes_beside_a_plain_copy(name: str) -> None:
    results = run_once(name)
    assert [(result.implementation, result.status, result.reason) for result in results] == [
        ("views", "pass", ""),
        ("device_copy", "pass", ""),
    ]


@pytest.mark.parametrize("name", NAMES[:2])
def test_case_refuses_pieces_that_did_not_arrive(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = load_cases()[name].prepare(get_device("cpu"))
    contender = work.contenders[0]
    contender.check(contender.run())
    whole = ViewCopies.run

    def last_is_lost(self: ViewCopies) -> None:
        whole(self)
        self._views[-1][0].fill_(9)

    monkeypatch.setattr(ViewCopies, "run", last_is_lost)
    with pytest.raises(AssertionError, match="arrived with other values"):
        contender.check(contender.run())


def test_check_finds_what_was_not_written_and_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync_copies, "_CHECKED_AT_ONCE", 1000)
    sync = weight_sync_copies._CopyProblem(get_device("cpu"), weight_sync_copies._for_host(QWEN_7B), torch.bfloat16, 1)
    copies = ViewCopies(sync.pieces, sync.sources, [sync.engine])
    assert 0 < _largest_taken(lambda: sync.check(copies.run)) < sync.engine.numel() // 2

    def but_one() -> None:
        copies.run()
        sync.engine[-1] = 9

    monkeypatch.setattr(weight_sync_copies, "_NUM_CHECKED", 1)
    monkeypatch.setattr(sync, "pieces", sync.pieces[:1])
    with pytest.raises(AssertionError, match="elements were not written"):
        sync.check(but_one)


def _largest_taken(run: Callable[[], None]) -> int:
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
        run()
    return max(event.cpu_memory_usage for event in profiler.events())


@pytest.mark.parametrize(("model", "names"), [(QWEN_7B, 254), (QWEN_30B_A3B, 18722)])
def test_the_shapes_are_those_of_the_models(model: ModelShape, names: int) -> None:
    moves = list(weight_sync_copies._moves(model, 1))
    assert len(moves) == names  # without norms of heads, biases and routers
    numel = sum(move.rows * move.kept for move in moves)
    assert numel * torch.bfloat16.itemsize == pytest.approx({254: 15.2e9, 18722: 61.0e9}[names], rel=0.01)
