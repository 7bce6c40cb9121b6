"""The trainer's side of ``rlcore_ipc``, driven as vLLM drives it, with the receivers of vLLM's workers alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import rlcore
from rlcore.engines.sampling.vllm.trainer import (
    ModuleWeights,
    RlcoreTrainerInitInfo,
    RlcoreTrainerWeightTransferEngine,
)
from rlcore.engines.weight_sync.channels.connections import connect_control
from rlcore.errors import InvalidInputError, SyncError


class Source:
    """A source like vLLM's ``ModuleSource``, before 0.33."""

    def __init__(self, module: nn.Module) -> None:
        self._given = module

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._given.named_parameters()


class FullSource:
    """A source of a user, for 0.33."""

    def __init__(self, module: nn.Module) -> None:
        self._given = module

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._given.named_parameters():
            yield name, parameter.detach().clone()


class Client:
    """A client like vLLM's, with workers in this process."""

    def __init__(self, models: list[nn.Module]) -> None:
        self.models, self.called, self.versions = models, list[str](), list[str | None]()
        self.receivers: list[rlcore.WeightReceiver] = []
        self.refuses = ""

    def _each(self, method: str, act: Callable[[Any], Any], workers: Any) -> None:
        self.called.append(method)
        if self.refuses == method:
            raise RuntimeError("vLLM says no")
        threads = [threading.Thread(target=act, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        def connect(model: nn.Module) -> None:
            control = connect_control(init_info["address"], timeout_s=init_info["timeout_s"])
            self.receivers.append(rlcore.WeightReceiver(model, control))

        self._each("init", connect, self.models)

    def start_weight_update(self) -> None:
        self._each("start", print, ())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._each("update", lambda receiver: receiver.receive(update_info["timeout_s"]), self.receivers)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._each("finish", print, ())
        self.versions.append(weight_version)


class UnnumberedClient(Client):
    """A client of a vLLM that numbers no weights."""

    def finish_weight_update(self) -> None:  # type: ignore[override]
        super().finish_weight_update()


@pytest.fixture
def policy() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 3))


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client([nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 3)).bfloat16() for _ in range(2)])
    yield client
    for receiver in client.receivers:
        receiver.close()
        receiver._control.close()  # type: ignore[attr-defined]


@pytest.fixture
def info(short_folder: Path) -> RlcoreTrainerInitInfo:
    return RlcoreTrainerInitInfo(str(short_folder / "weights"), num_workers=2, timeout_s=60)


def check(policy: nn.Module, client: Client) -> None:
    for model in client.models:
        for one, other in zip(model.parameters(), policy.parameters(), strict=True):
            assert torch.equal(one, other.bfloat16())


@pytest.mark.parametrize("kind", [ModuleWeights, Source, FullSource])
def test_each_round_all_workers_get_the_weights(kind: Any, policy: nn.Module, client: Client, info: Any) -> None:
    engine = RlcoreTrainerWeightTransferEngine.trainer_init(init_info=info, client=client, source=kind(policy))
    for version in (1, 2):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(1)
        report = engine.send_weights()
        assert report is not None and report.version == version and report.moved_bytes > 0
        check(policy, client)
    assert client.called == ["init", *["start", "update", "finish"] * 2]
    engine.shutdown()
    assert not Path(info.address).exists()


@pytest.mark.parametrize("kind", [Client, UnnumberedClient])
def test_vllm_is_told_the_version_where_it_numbers_weights(kind: type[Client], policy: nn.Module, info: Any) -> None:
    client = kind([nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 3)).bfloat16() for _ in range(2)])
    engine = RlcoreTrainerWeightTransferEngine.trainer_init(init_info=info, client=client, source=ModuleWeights(policy))
    reports = [engine.send_weights(), engine.send_weights(version=7), engine.send_weights()]
    assert [report.version for report in reports if report] == [1, 7, 8]
    assert client.versions == (["1", "7", "8"] if kind is Client else [None] * 3)
    engine.shutdown()
    for receiver in client.receivers:
        receiver.close()
        receiver._control.close()  # type: ignore[union-attr]


def test_vllm_0_26_gives_its_configuration_first(policy: nn.Module, client: Client, info: Any) -> None:
    engine = RlcoreTrainerWeightTransferEngine.trainer_init(
        config=object(), init_info=info, client=client, source=Source(policy)
    )
    engine.send_weights()
    check(policy, client)
    engine.shutdown()


def test_copies_of_the_last_round_are_gone_before_the_next_are_made(
    policy: nn.Module, client: Client, info: Any
) -> None:
    storages: list[StorageWeakRef] = []

    class Gathered(FullSource):
        def iter_full(self) -> Iterator[tuple[str, Tensor]]:
            for receiver in client.receivers:  # they read the copies where they are, being in this process
                receiver.close()
            assert all(storage.expired() for storage in storages)
            storages.clear()
            for name, tensor in super().iter_full():
                storages.append(StorageWeakRef(tensor.untyped_storage()))
                yield name, tensor

    engine = RlcoreTrainerWeightTransferEngine.trainer_init(init_info=info, client=client, source=Gathered(policy))
    for _ in range(3):
        engine.send_weights()
        check(policy, client)
    engine.shutdown()


def test_all_ranks_go_through_a_source_once_a_round(policy: nn.Module, client: Client, info: Any) -> None:
    """A source gathers, and waits for all ranks each time: one pass more on one rank would stop them for ever."""
    seen: list[str] = []

    class Counted(FullSource):
        def iter_full(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in super().iter_full():
                seen.append(name)
                yield name, tensor

    def passes(rank: int) -> list[int]:
        seen.clear()
        own = RlcoreTrainerInitInfo(info.address, num_workers=2, timeout_s=60, rank=rank)
        engine = RlcoreTrainerWeightTransferEngine.trainer_init(own, client=client, source=Counted(policy))
        counts = []
        for _ in range(3):
            report = engine.send_weights()
            assert (report is None) is (rank > 0)
            counts.append(len(seen) // 4)
        engine.shutdown()
        return counts

    assert passes(1) == [1, 2, 3] and not client.called
    assert passes(0) == [1, 2, 3]


@pytest.mark.parametrize("step", ["init", "start", "update"])
def test_what_vllm_refuses_is_told(
    step: str, policy: nn.Module, client: Client, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcore.engines.weight_sync.session._GRACE_S", 0.5)
    client.refuses = step
    info = RlcoreTrainerInitInfo(str(short_folder / "w"), num_workers=2, timeout_s=4.0)
    engine = None
    with pytest.raises((SyncError, RuntimeError)) as caught:
        engine = RlcoreTrainerWeightTransferEngine.trainer_init(info, client=client, source=Source(policy))
        engine.send_weights()
    if engine is not None:
        engine.shutdown()
    told = caught.value if step == "start" else caught.value.__cause__
    assert "vLLM says no" in str(told)


def test_nobody_waits_for_the_workers_of_a_vllm_that_refuses(
    policy: nn.Module, client: Client, short_folder: Path
) -> None:
    client.refuses = "init"
    info = RlcoreTrainerInitInfo(str(short_folder / "w"), num_workers=2, timeout_s=3600)
    with pytest.raises(SyncError, match=r"0 of 2 receivers have connected to .*/w, and no more will") as caught:
        RlcoreTrainerWeightTransferEngine.trainer_init(info, client=client, source=Source(policy))
    assert "vLLM says no" in str(caught.value.__cause__)


def test_what_it_takes(client: Client, policy: nn.Module, info: Any) -> None:
    with pytest.raises(
        InvalidInputError, match="an RlcoreTrainerInitInfo and a source of weights, got dict and Source"
    ):
        RlcoreTrainerWeightTransferEngine.trainer_init({}, client=client, source=Source(policy))
    with pytest.raises(InvalidInputError, match="got RlcoreTrainerInitInfo and NoneType"):
        RlcoreTrainerWeightTransferEngine.trainer_init(info, client=client)
