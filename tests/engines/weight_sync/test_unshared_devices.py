"""Weight syncs from devices whose memory other processes cannot open: staging buffers on the host take their place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from small_engine import Checkpoint, Sizes, SmallModel, SmallTarget, checkpoint, expected

from rlcore.devices.cpu.device import CpuDevice, CpuMemory
from rlcore.devices.cpu.sharing import CpuSharing
from rlcore.devices.ipc.sharing import SharedMemory
from rlcore.engines.weight_sync import agreement
from rlcore.engines.weight_sync.channels.peers import LocalPeers
from rlcore.engines.weight_sync.module_source import ModuleSourceTensors
from rlcore.engines.weight_sync.options import RoundOptions
from rlcore.engines.weight_sync.receiver import Receiver
from rlcore.engines.weight_sync.sender import Sender
from rlcore.engines.weight_sync.session import SyncSession
from rlcore.errors import UnsupportedError
from rlcore.registry import get_device
from rlcore.types import IpcExport, SyncReport

SIZES = Sizes(experts=2, is_tied=True, has_state=True)


class OldMemory(CpuMemory):
    """The memory of a driver that is known to share none."""

    sharing_class = None


class RefusingSharing(CpuSharing):  # type: ignore[misc]  # final, for other devices
    num_asked = 0

    def share(self, storage: torch.UntypedStorage) -> SharedMemory:
        RefusingSharing.num_asked += 1
        raise UnsupportedError("export_ipc of this block of memory", "the card has no such thing")


class RefusingMemory(CpuMemory):
    """The memory of a card that refuses when it is asked."""

    sharing_class = RefusingSharing


class Old(CpuDevice):  # type: ignore[misc]
    memory_class = OldMemory


class Refusing(CpuDevice):  # type: ignore[misc]
    memory_class = RefusingMemory


class Worker:
    """Holds the model that ``SmallTarget`` writes into."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.new_model = lambda: SmallModel(SIZES, 0, 1, torch.bfloat16)
        self.model = self.new_model()
        self.versions: list[int] = []


class World(NamedTuple):
    module: Any
    session: SyncSession
    worker: Worker
    sender: Sender
    earlier: set[str]
    """Exports of other tests."""

    def exports(self) -> list[IpcExport]:
        return [export for export in get_device("cpu").memory.ledger() if export.export_id not in self.earlier]

    def sync(self, **options: Any) -> SyncReport:
        given = {"version": 1, "staging_bytes": 4096, "checksums": "always"} | options
        return self.session.run(RoundOptions(**given), nullcontext)

    def check(self) -> None:
        weights = {name: tensor.detach() for name, tensor in self.module.named_weights()}
        (wanted,) = expected(weights, SIZES, 1, torch.bfloat16)
        for name, parameter in self.worker.model.named_parameters():
            assert torch.equal(parameter, wanted[name]), name


@pytest.fixture(params=[Old, Refusing])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    kind, earlier = request.param, {export.export_id for export in get_device("cpu").memory.ledger()}
    spec = dataclasses.replace(get_device("cpu").spec, name="walled", is_host=False)
    weights = checkpoint(SIZES, seed=1)
    module = Checkpoint(weights)
    for name, parameter in module.named_parameters():
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(weights[name].clone()))
    sender, worker = Sender(ModuleSourceTensors(module, 1), kind(spec, 0)), Worker(kind(spec, 1))
    receiver = Receiver(SmallTarget(worker))  # type: ignore[arg-type]
    session = SyncSession(LocalPeers("the trainer", [sender]), LocalPeers("the engine", [receiver]))
    yield World(module, session, worker, sender, earlier)
    receiver.close()
    sender.close()


def test_packed_goes_through_shared_memory_of_the_host_and_says_why(world: World) -> None:
    reason = {
        "OldMemory": "walled names no devices.ipc.sharing.Sharing, by which processes open its memory",
        "RefusingMemory": "the card has no such thing",
    }[type(world.worker.device.memory).__name__]
    RefusingSharing.num_asked = 0
    for number in range(3):
        world.module.add(0.5)
        report = world.sync(route="packed", version=number, is_verified=number == 1)
        assert report.route == "packed"
        assert reason in report.why_on_host
        assert report.handles_opened == (1 if number == 0 else 0), "the staging buffers stay open"
        world.check()
    assert RefusingSharing.num_asked <= 1
    world.module.add(0.5)
    assert (report := world.sync()).route == "local" and report.why_on_host == "", "there is one process"
    world.module.add(0.5)
    assert reason in world.sync(route="packed").why_on_host
    world.check()
    assert world.exports(), "what is shared is the host's"
    world.sender.close()
    assert not world.exports()


def test_no_other_route_shares_its_memory(world: World) -> None:
    with pytest.raises(UnsupportedError, match=r"route='direct' from the trainer to the engine"):
        world.sync(route="direct")
    assert world.sync().why_on_host == "", "in one process there is nothing to share"


def test_buffers_of_the_host_are_no_larger_than_containers_allow(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_SMALLEST_STAGING_BYTES", 1024)
    monkeypatch.setattr(agreement, "_HOST_STAGING_BYTES", 2048)
    world.sync(route="packed", staging_bytes=None)
    (export,) = world.exports()
    assert export.storage_bytes == 2 * 2048
    world.check()
