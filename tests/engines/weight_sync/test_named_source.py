"""Tensors that a program gives by name: what is done for each of them once, and what is seen in every round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rlcore.engines.weight_sync.named_source import NamedSourceTensors
from rlcore.engines.weight_sync.planning.manifest import describe
from rlcore.errors import StateError, SyncError


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that tensors are described."""
    found: list[int] = []

    def counted(views: Any, num_ranks: int) -> Any:
        found.append(num_ranks)
        return describe(views, num_ranks)

    monkeypatch.setattr("rlcore.engines.weight_sync.named_source.describe", counted)
    return found


def tensors() -> dict[str, Tensor]:
    return {"a": torch.ones(4, 4), "b": torch.ones(3), "c": torch.ones(4, 6).t(), "d": torch.ones(2, 2)}


def refreshed(source: NamedSourceTensors) -> list[Tensor]:
    source.refresh()
    return source.parts()


def test_what_has_not_moved_is_described_once_and_stays_the_same_list(described: list[int]) -> None:
    given = tensors()
    source = NamedSourceTensors(lambda: given, 1)
    with pytest.raises(StateError, match=r"no tensors yet; call send\(\)"):
        _ = source.manifest
    parts = refreshed(source)
    changes = source.changes()
    given["a"].add_(1)
    assert refreshed(source) is parts
    assert [part.data_ptr() for part in parts] == [given[name].data_ptr() for name in "abd"], "c is not by rows"
    assert source.changes() != changes
    assert len(described) == 1


@pytest.mark.parametrize(
    "renew",
    [
        pytest.param(lambda one: one.detach(), id="other objects over the same memory"),
        pytest.param(lambda one: one.clone(), id="other memory"),
    ],
)
def test_new_tensors_of_the_same_layout_are_not_described_again(
    described: list[int], renew: Callable[[Tensor], Tensor]
) -> None:
    given = tensors()
    source = NamedSourceTensors(lambda: given, 1)
    refreshed(source)
    given = {name: renew(tensor) for name, tensor in given.items()}
    parts = refreshed(source)
    assert [part.data_ptr() for part in parts] == [given[name].data_ptr() for name in "abd"]
    assert source.compute([2])[0].equal(given["c"])
    changes = source.changes()
    given["b"].add_(1)
    assert source.changes() != changes, "of the tensors that were given last"
    assert len(described) == 1


def test_a_write_through_a_sharded_tensor_is_a_change() -> None:
    """It is counted by the DTensor and not by its part."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        given = {"a": distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])}
        source = NamedSourceTensors(lambda: given, 1)
        source.refresh()
        before = source.changes()
        assert source.changes() == before
        given["a"].add_(1)
        assert source.changes() != before
    finally:
        dist.destroy_process_group()


def test_memory_that_was_put_in_place_of_another_is_found(described: list[int]) -> None:
    given = tensors()
    source = NamedSourceTensors(lambda: given, 1)
    refreshed(source)
    given["a"].data = torch.full((4, 4), 7.0)
    assert refreshed(source)[0].equal(given["a"])
    assert len(described) == 1


def test_what_it_forgot_is_free_and_not_described_again(described: list[int]) -> None:
    given = tensors()
    source = NamedSourceTensors(lambda: given, 1)
    refreshed(source)
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in given.values()]
    given = {}
    source.forget()
    assert all(storage.expired() for storage in storages)
    given = tensors()
    assert [part.data_ptr() for part in refreshed(source)] == [given[name].data_ptr() for name in "abd"]
    assert len(described) == 1


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            lambda given: setattr(given["a"], "data", given["a"].data.view(2, 8)),
            r"of other shapes: a \[2, 8\] for \[4",
        ),
        (lambda given: given["a"].t_(), "their dtypes, order or sharding are others"),
        (lambda given: given.update(a=given["a"].bfloat16()), "their dtypes, order or sharding are others"),
        (lambda given: given.update(a=given.pop("a")), "their dtypes, order or sharding are others"),
        (lambda given: given.update(e=torch.ones(1)), "unexpected: e"),
        (lambda given: given.pop("b"), "missing: b"),
    ],
    ids=["shape", "stride", "dtype", "order", "more", "fewer"],
)
def test_tensors_of_another_layout_are_refused_and_nothing_is_taken(change: Callable[[Any], Any], found: str) -> None:
    given = tensors()
    before = dict(given)
    source = NamedSourceTensors(lambda: given, 1)
    parts = refreshed(source)
    change(given)
    with pytest.raises(SyncError, match=found):
        source.refresh()
    if found.startswith(("unexpected", "missing")):
        given = before
        assert refreshed(source) is parts
