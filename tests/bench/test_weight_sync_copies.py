"""The cases of the copies of a weight sync pass on a host, and refuse what is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from once import run_once

from rlcore.bench.case import load_cases
from rlcore.bench.cases import weight_sync_copies
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
    monkeypatch.setattr(weight_sync_copies, "_NUM_CHECKED", 1)  # the first weight, and the last
    work = load_cases()[NAMES[0]].prepare(get_device("cpu"))
    contender = work.contenders[0]
    elements = int(work.params["elements"])
    assert 0 < _largest_taken(lambda: contender.check(None)) < elements // 2
    whole = ViewCopies.run

    def second_is_lost(self: ViewCopies) -> None:
        whole(self)
        self._views[1][0].fill_(9)

    monkeypatch.setattr(ViewCopies, "run", second_is_lost)
    with pytest.raises(AssertionError, match="elements were not written"):
        contender.check(None)


def _largest_taken(run: Callable[[], None]) -> int:
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
        run()
    return max(event.cpu_memory_usage for event in profiler.events())


class NoMemory:
    """FAKE: an accelerator whose tensors have shapes and no memory. Proves nothing about one."""

    spec = dataclasses.replace(get_device("cpu").spec, is_host=False)
    type, torch_device = "cpu", torch.device("meta")


@pytest.mark.parametrize(
    ("name", "pieces", "nbytes"),
    [(NAMES[0], 254, 15.2e9), (NAMES[2], 254, 7.6e9), pytest.param(NAMES[3], 18722, 61.0e9, marks=pytest.mark.slow)],
)
def test_the_shapes_are_those_of_the_models(name: str, pieces: int, nbytes: float) -> None:
    work = load_cases()[name].prepare(NoMemory())
    assert work.params["pieces"] == pieces  # without norms of heads, biases and routers
    assert work.params["elements"] * 2 == pytest.approx(nbytes, rel=0.01)
    assert work.bytes == work.params["elements"] * 4, "read and written"
