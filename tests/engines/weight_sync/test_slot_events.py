"""Both sides of a staging buffer wait for each other; the devices' streams write down what is queued on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from small_engine import Checkpoint, Sizes, SmallModel, SmallTarget, checkpoint, expected

from rlcore.engines.weight_sync.channels.peers import LocalPeers
from rlcore.engines.weight_sync.module_source import ModuleSourceTensors
from rlcore.engines.weight_sync.options import RoundOptions
from rlcore.engines.weight_sync.receiver import Receiver
from rlcore.engines.weight_sync.sender import Sender
from rlcore.engines.weight_sync.session import SyncSession
from rlcore.engines.weight_sync.transports.base import Route
from rlcore.errors import DeviceError, UnsupportedError
from rlcore.registry import get_device
from rlcore.types import EventHandle

SIZES = Sizes(layers=1)


class Event:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def record(self, stream: Any) -> None:
        self._log.append(f"{stream.name} sets {self.name}")


class Stream(NamedTuple):
    name: str
    log: list[str]

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")


class Streams:
    """Events of all devices are known to all."""

    known: dict[bytes, Event] = {}  # noqa: RUF012

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log
        self._numbers = itertools.count()
        self.refuses = ""

    def event(self, *, interprocess: bool) -> Event:
        assert interprocess
        if self.refuses == "event":
            raise UnsupportedError("events", "it is a test")
        return Event(f"{self._name}{next(self._numbers)}", self._log)

    def export_event(self, event: Event) -> EventHandle:
        payload = event.name.encode()
        self.known[payload] = event
        return EventHandle(device="cpu", device_uuid="", boot_id="", payload=payload)

    def import_event(self, handle: EventHandle) -> Event:
        if self.refuses == "import":
            raise DeviceError("not visible here")
        return self.known[handle.payload]

    def current(self) -> Stream:
        return Stream(self._name, self._log)


class Device:
    """The host, but for its streams."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.log, self.own_name = log, name
        self.streams = Streams(name, log)

    def synchronize(self) -> None:
        self.log.append(f"{self.own_name} is waited for")

    def __getattr__(self, name: str) -> Any:
        return getattr(get_device("cpu"), name)


class Sides(NamedTuple):
    module: Any
    session: SyncSession
    models: list[SmallModel]
    devices: dict[str, Device]
    log: list[str]

    def sync(self, route: Route = "packed") -> str:
        """Check that all weights arrived; returns how the sides waited for each other."""
        self.module.add(1.0)
        self.log.clear()
        options = RoundOptions(version=1, route=route, staging_bytes=4096)
        report = self.session.run(options, nullcontext)
        weights = {name: tensor.detach() for name, tensor in self.module.named_weights()}
        for model, wanted in zip(self.models, expected(weights, SIZES, len(self.models), torch.float32), strict=True):
            assert all(torch.equal(dict(model.named_parameters())[name], tensor) for name, tensor in wanted.items())
        return report.staging_waits_by


def receiver_on(device: Device, model: SmallModel) -> Receiver:
    """Return one that says that it is of another process."""
    worker: Any = type("Worker", (), {"device": device, "model": model, "versions": []})()
    worker.new_model = lambda: SmallModel(SIZES, model.shard, model.shards, torch.float32)
    made = Receiver(SmallTarget(worker))
    made._info = msgspec.structs.replace(made._info, process=f"process of {device.own_name}")
    return made


@pytest.fixture
def sides() -> Iterator[Sides]:
    """A trainer, T, and the two shards of an engine, A and B, which say that they are of another process."""
    log: list[str] = []
    devices = {name: Device(name, log) for name in "TAB"}
    weights = checkpoint(SIZES, seed=1)
    module = Checkpoint(weights)
    for name, parameter in module.named_parameters():
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(weights[name].clone()))  # type: ignore[no-untyped-call]
    sender = Sender(ModuleSourceTensors(module, 1), devices["T"])
    models = [SmallModel(SIZES, shard, 2, torch.float32) for shard in range(2)]
    receivers = [receiver_on(devices[name], model) for name, model in zip("AB", models, strict=True)]
    session = SyncSession(LocalPeers("the trainer", [sender]), LocalPeers("the engine", receivers))
    yield Sides(module, session, models, devices, log)
    for receiver in receivers:
        receiver.close()
    sender.close()


def test_devices_wait_for_each_other_and_no_process_for_its_device(sides: Sides) -> None:
    for _ in range(2):  # the first plans and proves
        assert sides.sync() == "event"
    moving = [line for line in sides.log if "waits for" in line or "sets" in line]
    first, last = sides.log.index(moving[0]), len(sides.log) - sides.log[::-1].index(moving[-1])
    assert sides.log[first:last] == moving, "no process waited for its device while buckets were moved"
    filled = [number for number, line in enumerate(moving) if line.startswith("T sets")]
    assert len(filled) > 4
    for step, at in enumerate(filled):
        slot = str(step % 2)
        assert moving[at] == f"T sets T{slot}"
        assert moving[at - 2 : at] == [f"T waits for A{slot}", f"T waits for B{slot}"], "before it filled it again"
    emptied = [number for number, line in enumerate(moving) if line[0] in "AB" and "waits" in line]
    assert len(emptied) == len(filled), "each bucket is one receiver's: their plans differ"
    for step, at in enumerate(emptied):
        name, slot = moving[at][0], str(step % 2)
        assert moving[at : at + 2] == [f"{name} waits for T{slot}", f"{name} sets {name}{slot}"]
        assert filled[step] < at
        assert step + 2 >= len(filled) or at < filled[step + 2] - 2, "it is queued before it is waited for"


def test_a_trainer_waits_for_the_receivers_of_the_round_and_for_no_other(sides: Sides) -> None:
    """It waited for those who had exchanged events with it last, while these read the slot that it filled."""
    model = SmallModel(SIZES, 0, 1, torch.float32)
    other = receiver_on(Device("C", sides.log), model)
    session = SyncSession(sides.session.senders, LocalPeers("another engine", [other]))
    alone = sides._replace(session=session, models=[model])
    waited = []
    for one in (sides, alone, sides, alone):
        assert one.sync() == "event"
        waited.append({line for line in sides.log if line.startswith("T waits")})
    of_sides, of_other = ({f"T waits for {name}{slot}" for name in names for slot in "01"} for names in ("AB", "C"))
    assert waited == [of_sides, of_other] * 2, "the events of the first rounds, which nobody has opened anew"
    other.close()


@pytest.mark.parametrize(("name", "what"), [("T", "event"), ("A", "event"), ("T", "import"), ("B", "import")])
def test_where_one_cannot_each_process_waits_for_its_own_device(sides: Sides, name: str, what: str) -> None:
    sides.devices[name].streams.refuses = what
    assert sides.sync() == "host"
    assert sides.sync() == "host"
    assert not [line for line in sides.log if "waits for" in line or "sets" in line]
    assert {f"{name} is waited for" for name in "TAB"} <= set(sides.log)


def test_a_process_does_not_open_its_own_events(sides: Sides) -> None:
    receivers: Any = sides.session.receivers._peers  # type: ignore[attr-defined]
    receivers[1]._info = msgspec.structs.replace(
        receivers[1]._info,
        process=sides.session.senders._peers[0]._info.process,  # type: ignore[attr-defined]
    )
    assert sides.sync() == "host"


def test_ranks_that_pass_buckets_on_wait_for_their_own_devices(sides: Sides) -> None:
    """No event says when a slot was filled, as another rank may have sent what is in it."""
    for _ in range(2):
        assert sides.sync("relayed") == "host"
    assert not [line for line in sides.log if "waits for" in line or "sets" in line]
