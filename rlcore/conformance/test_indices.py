"""A device of another index than the active one: its streams, seeds, waits, statistics and exports are its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rlcore.conformance.memory_tasks import allocated
from rlcore.conformance.work import MB, BusyWork, filled
from rlcore.device import Device
from rlcore.registry import get_device


@pytest.fixture
def other(device: Device) -> Iterator[Device]:
    """Another device of the kind, while the one under test is active."""
    if device.spec.is_host or device.count() == 1:
        pytest.skip(f"{device.spec.name} has one memory here")
    device.activate()
    yield get_device(f"{device.spec.name}:{(device.index + 1) % device.count()}")
    device.activate()


@pytest.mark.covers("streams.new", "streams.current", "streams.use")
def test_streams_are_of_the_device_that_was_asked(device: Device, other: Device) -> None:
    before, others = device.streams.current(), other.streams.current()
    stream = other.streams.new()
    with other.streams.use(stream):
        if device.capabilities()["streams.use"].support == "native":
            assert other.streams.current() == stream != others
        value = torch.ones(8, device=other.torch_device) * 3
    stream.synchronize()
    assert value.sum().item() == 24
    assert (device.streams.current(), other.streams.current()) == (before, others)
    assert torch.ones(1, device=device.type).device == device.torch_device, "the active device is another now"


@pytest.mark.covers("streams.event")
def test_an_event_is_reached_by_the_stream_of_the_device_that_was_asked(other: Device) -> None:
    busy, stream, event = BusyWork.of(other), other.streams.new(), other.streams.event()
    value = torch.zeros(MB, device=other.torch_device)
    other.synchronize()
    with other.streams.use(stream):
        busy.queue()
        value.fill_(3)
        event.record(stream)
    event.synchronize()
    assert event.query()
    assert value.min().item() == 3, "the event was reached before the work that was queued before it"


@pytest.mark.covers("identity.synchronize")
def test_synchronize_waits_for_the_device_that_was_asked(other: Device) -> None:
    busy, stream = BusyWork.of(other), other.streams.new()
    for _ in range(3):
        with other.streams.use(stream):
            busy.queue()
        other.synchronize()
        assert stream.query(), f"{other.name} still has work after its synchronize()"


@pytest.mark.covers("identity.seed", "identity.rng_state", "identity.set_rng_state")
def test_random_numbers_are_of_the_device_that_was_asked(device: Device, other: Device) -> None:
    of_device = device.rng_state()
    drawn = []
    for _ in range(2):
        other.seed(7)
        drawn.append(torch.rand(8, device=other.torch_device))
    state = other.rng_state()
    drawn += [torch.rand(8, device=other.torch_device)]
    other.set_rng_state(state)
    drawn += [torch.rand(8, device=other.torch_device)]
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[2], drawn[3])
    assert torch.equal(device.rng_state(), of_device), f"{device.name} has another random state now"


@pytest.mark.covers("memory.stats")
def test_statistics_are_of_the_device_that_was_asked(device: Device, other: Device) -> None:
    filled(other, 1)
    before = allocated(device), allocated(other)
    tensor = filled(other, 64 * MB)
    assert allocated(other) - before[1] == pytest.approx(tensor.nbytes, abs=MB)
    assert allocated(device) == before[0]


@pytest.mark.covers("memory.ledger", "memory.export_ipc", "memory.revoke")
def test_the_ledger_has_the_exports_of_its_own_device(device: Device, other: Device) -> None:
    tensor = torch.ones(4, device=other.torch_device)
    other.synchronize()
    handle = other.memory.export_ipc(tensor)
    listed = {one.name: [export.export_id for export in one.memory.ledger()] for one in (device, other)}
    other.memory.revoke(handle)
    assert handle.export_id in listed[other.name]
    assert handle.export_id not in listed[device.name]
