"""Tags whose memory a saver maps and unmaps; one that frees host memory plays torch_memory_saver."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from rlcore.engines.sampling.sglang import saved_memory
from rlcore.engines.sampling.sglang.saved_memory import SavedGroup
from rlcore.errors import DeviceError
from rlcore.registry import get_device


class Saver:
    """Memory that is lost while a tag is away, at addresses that stay."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors, self.calls = tensors, list[str]()

    def pause(self, tag: str) -> None:
        self.calls.append(f"pause {tag}")
        for tensor in self.tensors:
            ctypes.memset(tensor.data_ptr(), 0xFF, tensor.nbytes)

    def resume(self, tag: str) -> None:
        self.calls.append(f"resume {tag}")


@pytest.fixture
def weights() -> list[Tensor]:
    return [torch.arange(64.0), torch.full((3, 5), 2.0)]


@pytest.fixture
def table() -> Tensor:
    return torch.arange(7.0)


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch, weights: list[Tensor], table: Tensor) -> Saver:
    made = Saver([*weights, table])
    monkeypatch.setattr(saved_memory.versions, "memory_saver", lambda: made)
    monkeypatch.setattr(saved_memory.versions, "require_memory_saver", lambda: None)
    return made


def test_weights_leave_as_one_and_come_back_where_they_were(saver: Saver, weights: list[Tensor], table: Tensor) -> None:
    group = SavedGroup(get_device("cpu"), "weights", lambda: weights, lambda: [table])
    before = [tensor.clone() for tensor in (*weights, table)]
    for _ in range(2):
        places = [tensor.data_ptr() for tensor in weights]
        report = group.offload()
        assert report.moved_bytes == report.freed_device_bytes == sum(tensor.nbytes for tensor in weights)
        assert (group.is_away, group.device_bytes) == (True, 0)
        group.onload()
        assert [tensor.data_ptr() for tensor in weights] == places
        assert all(map(torch.equal, (*weights, table), before)), "the table is in that memory too"
    assert saver.calls == ["pause weights", "resume weights"] * 2


def test_a_release_copies_nothing_but_what_no_sync_brings(saver: Saver, weights: list[Tensor], table: Tensor) -> None:
    group, kept = SavedGroup(get_device("cpu"), "weights", lambda: weights, lambda: [table]), table.clone()
    assert group.meta().moved_bytes == 0
    group.onload()
    assert saver.calls == ["pause weights", "resume weights"]
    assert torch.equal(table, kept)
    assert weights[0].isnan().all(), "their values are undefined"


def test_a_saver_that_is_not_in_place_is_seen_before_anything_leaves(weights: list[Tensor]) -> None:
    with pytest.raises(DeviceError, match=r"torch_memory_saver was not preloaded.*LD_LIBRARY_PATH before the program"):
        SavedGroup(get_device("cpu"), "weights", lambda: weights, tuple)
