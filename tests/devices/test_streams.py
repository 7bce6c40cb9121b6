"""Streams and events: what the CPU and CUDA do beyond what the conformance suite asks of every device."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest
import torch

from rlcore.devices.cpu import streams as cpu_streams
from rlcore.devices.cuda.device import CudaDevice
from rlcore.errors import InvalidInputError, StateError, UnsupportedError
from rlcore.process.status import boot_id
from rlcore.registry import get_device, registry
from rlcore.types import EventHandle

from .conftest import Peer


def long_work(device: Any) -> torch.Tensor:
    """Takes a GPU some ten milliseconds; the host is done when a call returns."""
    size, times = (4096, 10) if device.type != "cpu" else (16, 1)
    factor = torch.full((size, size), 1 / size, device=device.torch_device)
    product = torch.ones_like(factor)
    for _ in range(times):
        product = product @ factor
    return product


def test_a_cpu_event_measures_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1000.0, 1002.5])
    monkeypatch.setattr(cpu_streams, "time", types.SimpleNamespace(perf_counter=lambda: next(seconds)))
    start, end = (get_device("cpu").streams.event(timing=True) for _ in range(2))
    start.record()
    end.record()
    assert start.elapsed_time(end) == 2500.0


def test_cpu_events_measure_only_when_asked(device: Any) -> None:
    if device.type != "cpu":
        pytest.skip("torch's own events on a GPU")
    timed = device.streams.event(timing=True)
    with pytest.raises(InvalidInputError, match=r"^elapsed_time takes two events made with timing=True$"):
        device.streams.event().elapsed_time(timed)
    with pytest.raises(StateError, match=r"^elapsed_time takes two events that were recorded; call record\(\) on both"):
        timed.elapsed_time(timed)


def test_interprocess_events_are_there_or_say_why_not(device: Any) -> None:
    how = device.capabilities()["streams.import_event"]
    if how.support == "native":
        assert device.streams.event(interprocess=True) is not None
        return
    for call in (
        lambda: device.streams.event(interprocess=True),
        lambda: device.streams.export_event(device.streams.event()),
        lambda: device.streams.import_event(None),
    ):
        with pytest.raises(UnsupportedError, match=how.reason):
            call()


class FakeCudaEvent:
    """Of no GPU: it fails as torch's event does where the driver has no handle of it."""

    def ipc_handle(self) -> bytes:
        raise RuntimeError("CUDA error: invalid argument\nCUDA kernel errors might be asynchronously reported")

    @classmethod
    def from_ipc_handle(cls, device: torch.device, payload: bytes) -> None:
        raise RuntimeError("CUDA error: invalid resource handle\nFor debugging consider passing")

    def __repr__(self) -> str:
        return "<event>"


def test_cuda_says_which_event_has_no_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a FAKE event: which errors come out, nothing about a GPU."""
    monkeypatch.setattr(torch.cuda, "Event", FakeCudaEvent)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    spec, _ = registry().devices["cuda"]
    streams = CudaDevice(spec, 1).streams
    with pytest.raises(
        InvalidInputError,
        match=r"^export_event takes what event\(interprocess=True\) made; the driver has no handle of <event>: CUDA "
        r"error: invalid argument\. Make the event with cuda:1's streams\.event\(interprocess=True\)$",
    ):
        streams.export_event(FakeCudaEvent())  # type: ignore[arg-type]
    with pytest.raises(
        InvalidInputError, match=r"^export_event takes what event\(interprocess=True\) made, got 'event'$"
    ):
        streams.export_event("event")  # type: ignore[arg-type]
    gone = EventHandle(device="cuda", device_uuid="ab-cd", boot_id=boot_id(), payload=b"")
    with pytest.raises(
        InvalidInputError,
        match=r"^import_event: cuda:1 cannot open this event of GPU ab-cd: CUDA error: invalid resource handle\. That "
        r"GPU must be visible here, and its process must still hold the event$",
    ):
        streams.import_event(gone)


@pytest.mark.gpu
def test_cuda_exports_no_event_that_was_not_made_for_it() -> None:
    streams = get_device("cuda").streams
    for event in (streams.event(), streams.event(timing=True)):
        with pytest.raises(
            InvalidInputError, match=r"^export_event takes what event\(interprocess=True\) made; the driver"
        ):
            streams.export_event(event)


@pytest.mark.gpu
def test_another_process_waits_for_an_event(runtime_folder: object) -> None:
    device = get_device("cuda")
    peer = Peer("cuda", {})
    try:
        event = device.streams.event(interprocess=True)
        data = device.streams.export_event(event).to_bytes()
        assert EventHandle.from_bytes(data).device_uuid == device.properties().uuid
        tensor = torch.zeros(8, device="cuda")
        device.synchronize()
        handle = device.memory.export_ipc(tensor)
        peer.run(
            "mapping = device.memory.import_ipc(handle_of(text)); event = device.streams.import_event(event_of(data))",
            text=handle.to_bytes().hex(),
            data=data.hex(),
        )
        stream = device.streams.new()
        with device.streams.use(stream):
            kept = [long_work(device) for _ in range(100)]
            tensor.fill_(1)
            event.record(stream)
        seen = peer.run(
            "early = event.query()\n"
            "event.wait(device.streams.current())\n"
            "result = [early, mapping.tensor.clone().tolist(), event.query()]"
        )
        assert seen == [False, [1.0] * 8, True]
        assert kept
        with pytest.raises(InvalidInputError, match=r"^an interprocess event measures no time"):
            device.streams.event(timing=True, interprocess=True)
        with pytest.raises(InvalidInputError, match=r"^these 2 bytes are no EventHandle: "):
            EventHandle.from_bytes(data[:2])
    finally:
        peer.close()
